"""Reference-counted pages of KV memory; a full block that is resident is shared by reference, never copied.

Knows nothing of tokens, jobs or the store. Only the event loop's thread takes and releases pages.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.paging import SpanLike
from kvstore.keys import BlockRef
from schemas.errors import KvrelayError


class OutOfPages(KvrelayError):
    """More pages were asked for than the reservations allow: a bug in the caller, never a user's fault."""


def _nothing() -> None:
    return None


class PagePool:
    """`num_pages` pages of `data: [P, L, 2, H, T, D]`; one page is the payload of one uncompressed blob.

    A page is free, held (one or more references), or idle: it carries the name of a full block, nobody holds it,
    and it stays resident until its memory is wanted (least recently released first).
    Memory is promised by `reserve` before it is taken, so `take` cannot fail for who keeps to his reservation.
    `on_unreserved` is called whenever a promise ends: who waits for room may have it now.
    """

    def __init__(
        self, num_pages: int, page_shape: tuple[int, int, int, int], dtype: torch.dtype, *, max_idle: int
    ) -> None:
        """`page_shape`: (L, H, T, D). At most `max_idle` idle pages stay resident."""
        layers, heads, tokens, dim = page_shape
        self.block_tokens = tokens
        # Not zeroed: the operating system gives memory when a page is first written, so unused ones cost none.
        self.data = torch.empty(num_pages, layers, 2, heads, tokens, dim, dtype=dtype)
        self._bytes: npt.NDArray[np.uint8] = self.data.view(torch.uint8).numpy()
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._key: list[bytes | None] = [None] * num_pages
        self._token_hash = [b""] * num_pages
        self._resident: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._max_idle = max_idle
        self._reserved = 0
        self.on_unreserved: Callable[[], None] = _nothing

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self._free) - len(self._idle)

    @property
    def num_unreserved(self) -> int:
        """Below zero while pinned pages are also covered by the promise of their holder."""
        return self.num_pages - self._reserved

    def reserve(self, num_pages: int) -> bool:
        """Promises `num_pages`; False, and nothing promised, when that many are not left."""
        if num_pages > self.num_unreserved:
            return False
        self._reserved += num_pages
        return True

    def unreserve(self, num_pages: int) -> None:
        self._reserved -= num_pages
        self.on_unreserved()

    def take(self) -> int:
        """A page with one reference and unspecified content. Raises `OutOfPages`."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page = self._evict()
        else:
            raise OutOfPages(f"all {self.num_pages} KV pages are held")
        self._references[page] = 1
        return page

    def pin(self, page: int) -> None:
        """One more reference to a held page, which may outlive its holder's reservation: it brings its own."""
        self._references[page] += 1
        self._reserved += 1

    def unpin(self, page: int) -> None:
        self.release([page])
        self.unreserve(1)

    def merge(self, refs: Sequence[BlockRef]) -> list[int]:
        """The pages of the longest run of resident blocks that begins `refs`, with one more reference each.

        Moves no bytes. The key alone does not decide: the hash of all tokens up to the block's end must match too.
        """
        resident, token_hashes = self._resident, self._token_hash
        pages = []
        for ref in refs:
            page = resident.get(ref.key)
            if page is None or token_hashes[page] != ref.token_hash:
                break
            pages.append(page)
        references, idle = self._references, self._idle
        for page in pages:
            if references[page] == 0:
                del idle[page]
            references[page] += 1
        return pages

    def name(self, page: int, ref: BlockRef) -> None:
        """Declares a held page to be the finished block `ref`; from now on it may be shared and is never written
        with other bytes. If the block is resident already, the page stays nameless."""
        if ref.key in self._resident or self._key[page] is not None:
            return
        self._resident[ref.key] = page
        self._key[page], self._token_hash[page] = ref.key, ref.token_hash

    def release(self, pages: Sequence[int]) -> None:
        """Of one sequence, in its order. The last page becomes idle first: without its beginning a chain is worth
        nothing, so the beginning stays longest."""
        references = self._references
        for page in reversed(pages):
            references[page] -= 1
            if references[page] == 0:
                if self._key[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None
        while len(self._idle) > self._max_idle:
            self._free.append(self._evict())

    @property
    def page_bytes(self) -> int:
        return int(self._bytes[0].size)

    def leading(self, page: int, num_tokens: int) -> npt.NDArray[np.uint8]:
        """Writable view [L, 2, H, num_tokens, bytes of D] of a page's first tokens; of all of them it is contiguous,
        and the payload of a blob: layer -> (K, V) -> kv head -> token -> dim."""
        return self._bytes[page, :, :, :, :num_tokens]

    def finite_rows(self, spans: Sequence[SpanLike]) -> npt.NDArray[np.bool_]:
        """Of the spans' rows, one after the other: whether their K and V are numbers, and of a row that completes a
        block all K and V of the block: `[R] bool`."""
        tokens = self.block_tokens
        rows = [
            (span.pages[at // tokens], at % tokens)
            for span in spans
            for at in range(span.start, span.start + span.rows)
        ]
        pages, slots = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2).T
        finite = self.data[pages, :, :, :, slots].isfinite().flatten(1).all(1)
        completing = (slots == tokens - 1).nonzero()[:, 0]
        if len(completing):
            finite[completing] &= self.data[pages[completing]].isfinite().flatten(1).all(1)
        return finite.numpy()

    def check_integrity(self) -> None:
        """Raises `AssertionError` if the books do not add up. For idle moments and tests."""
        free, idle = set(self._free), set(self._idle)
        held = {page for page, count in enumerate(self._references) if count > 0}
        assert not free & idle and not free & held and not idle & held
        assert len(free) + len(idle) + len(held) == self.num_pages
        assert len(free) == len(self._free)
        assert all(self._key[page] is not None for page in idle)
        assert all(self._key[page] is None for page in free)
        assert all(self._key[page] == key for key, page in self._resident.items())
        assert len(held) <= self._reserved

    def _evict(self) -> int:
        """Forgets the idle page that was released longest ago, and returns it."""
        page, _ = self._idle.popitem(last=False)
        key = self._key[page]
        assert key is not None
        del self._resident[key]
        self._key[page], self._token_hash[page] = None, b""
        return page
