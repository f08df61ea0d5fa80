"""What a pass waits for before it draws."""

from kernels.native.library import ffi, load


class DrawGate:
    """Of one pass; opened by a thread beside it."""

    def __init__(self) -> None:
        self.flag = ffi.new("int32_t *")

    def open(self) -> None:
        """What was written before is seen by the pass."""
        load().kvr_tell(self.flag)
