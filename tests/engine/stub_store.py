"""A store in memory whose calls a test can hold up or make fail."""

import threading
from collections.abc import Sequence

from kvstore.keys import BlockRef
from kvstore.patience import Patience


class StubStore:
    """`gate`: closed, loads and saves wait in their thread. `error`: every call raises it."""

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.renewed: list[bytes] = []
        self.used_at: dict[bytes, float | None] = {}
        self.reused: set[bytes] = set()
        self.num_loads = 0
        self.num_saves = 0

    def lookup(self, refs: Sequence[BlockRef]) -> int:
        self._pass()
        return next((i for i, ref in enumerate(refs) if ref.key not in self.stored), len(refs))

    def load(self, ref: BlockRef, into: memoryview, patience: Patience | None = None) -> bool:
        self.num_loads += 1
        self._pass()
        if ref.key not in self.stored:
            return False
        into[:] = self.stored[ref.key]
        return True

    def save(
        self,
        ref: BlockRef,
        payload: memoryview,
        ttl_s: float,
        *,
        used_at: float | None = None,
        everywhere: bool = True,
        quickly: bool = False,
    ) -> bool:
        self.num_saves += 1
        self._pass()
        self.used_at[ref.key] = used_at
        self.stored[ref.key] = bytes(payload)
        return True

    def renew(
        self, refs: Sequence[BlockRef], ttl_s: float, *, used_at: float | None = None, reused: bool = False
    ) -> int:
        self._pass()
        self.renewed += [ref.key for ref in refs]
        self.used_at |= {ref.key: used_at for ref in refs if ref.key in self.stored}
        self.reused |= {ref.key for ref in refs if reused}
        return len(refs)

    def _pass(self) -> None:
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
