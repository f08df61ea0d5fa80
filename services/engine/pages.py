"""Reference-counted pages of KV memory; a full block that is resident is shared by reference, never copied.

Knows nothing of tokens, jobs or the store. Only the event loop's thread takes and releases pages.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kernels.page_form import PageForm
from kernels.paging import SpanLike
from kvstore.keys import BlockRef
from schemas.errors import KvrelayError

Bytes = npt.NDArray[np.uint8]


class OutOfPages(KvrelayError):
    """More pages were asked for than the reservations allow: a bug in the caller, never a user's fault."""


def _nothing() -> None:
    return None


class PagePool:
    """`num_pages` pages of `data`, of the shape that `form` says; one page is the payload of one uncompressed blob.

    A page is free, held (one or more references), or idle: it carries the name of a full block, nobody holds it,
    and it stays resident until its memory is wanted (least recently released first).
    Memory is promised by `reserve` before it is taken, so `take` cannot fail for who keeps to his reservation.
    `on_unreserved` is called whenever a promise ends: who waits for room may have it now.
    """

    def __init__(self, num_pages: int, form: PageForm, *, max_idle: int) -> None:
        """At most `max_idle` idle pages stay resident."""
        self.form = form
        self.data = form.empty_pool(num_pages)
        self._bytes: Bytes = self.data.view(torch.uint8).numpy().reshape(num_pages, -1)
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
    def block_tokens(self) -> int:
        return self.form.page_tokens

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
        return self.form.page_bytes

    def leading(self, page: int, num_tokens: int) -> tuple[Bytes, ...]:
        """Writable views of what a page's first tokens are made of, see `parts_of`."""
        views = parts_of(self._bytes[page], self.form, self.block_tokens)
        return tuple(view[:, :, :, :num_tokens] for view in views)

    def payload_parts(self, payload: Bytes, num_tokens: int) -> tuple[Bytes, ...]:
        """Views of the payload of a blob of `num_tokens`, each of the shape of those that `leading` gives."""
        return parts_of(payload, self.form, num_tokens)

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
        # Whole numbers are finite: what was not has a scale that is not.
        numbers = self.form.scales(self.data) if self.form.is_quantised else self.data
        finite = numbers[pages, :, :, :, slots].isfinite().flatten(1).all(1)
        completing = (slots == tokens - 1).nonzero()[:, 0]
        if len(completing):
            finite[completing] &= numbers[pages[completing]].isfinite().flatten(1).all(1)
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


def parts_of(payload: Bytes, form: PageForm, num_tokens: int) -> tuple[Bytes, ...]:
    """`payload`, of a page or a blob of `num_tokens`, as views `[L, 2, H, num_tokens, bytes]`: the values, and if they
    are quantised their scales."""
    sides = payload.reshape(form.layers, 2, -1)
    value_bytes = form.kv_heads * num_tokens * form.value_bytes
    parts = (sides[..., :value_bytes], sides[..., value_bytes:]) if form.is_quantised else (sides,)
    shape = (form.layers, 2, form.kv_heads, num_tokens, -1)
    return tuple(part.reshape(shape, copy=False) for part in parts)
