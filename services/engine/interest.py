"""Whether somebody still waits for a block that a thread of the store reads or writes."""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.patience import Patience

Bytes = npt.NDArray[np.uint8]


class Interest:
    """A thread copies to or from a page only while it is there. `patience` is for reading it."""

    def __init__(self) -> None:
        self.patience = Patience()
        self._lock = threading.Lock()
        self._lost = False

    def lose(self) -> None:
        """From the return on, no thread touches the page. Waits for a copy under way, some 0.2 ms."""
        with self._lock:
            self._lost = True
        self.patience.give_up()

    @property
    def lost(self) -> bool:
        return self._lost

    def copy(self, targets: Sequence[Bytes], sources: Sequence[Bytes]) -> bool:
        """False, and nothing done, once nobody waits."""
        with self._lock:
            if not self._lost:
                for target, source in zip(targets, sources, strict=True):
                    np.copyto(target, source)
            return not self._lost
