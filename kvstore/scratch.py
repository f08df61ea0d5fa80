"""Memory that a thread uses again and again: touching fresh pages costs more than the codecs do."""

import threading

import numpy as np

from kvstore.geometry import Bytes


class Scratch:
    """One growing buffer a thread. What `take` returned is overwritten after the thread's next `take`."""

    def __init__(self) -> None:
        self._own = threading.local()

    def take(self, num_bytes: int) -> Bytes:
        buffer: Bytes | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._own.buffer = np.empty(num_bytes, np.uint8)
        return buffer[:num_bytes]
