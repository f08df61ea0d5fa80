"""A store read by who computes in another arithmetic: its blocks, as pages of the reader's own form.

What another arithmetic computed is rounded to what the reader keeps of K and V, always in the same way, so that all
readers of a build attend to the same numbers. In numpy: store threads must not start torch's thread pools.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import Geometry
from kvstore.keys import BlockRef
from kvstore.patience import Patience
from kvstore.quantise import NotFinitePage, Quantiser, page_floats, write_page
from kvstore.scratch import Scratch
from kvstore.store import KVStore
from schemas.blob import Quantisation
from schemas.errors import Internal


class ConvertedStore:
    """Reads `store`, never writes to it. Thread-safe."""

    def __init__(self, store: KVStore, geometry: Geometry, reader: Geometry) -> None:
        """`geometry` of the blocks, `reader` of the pages. Raises `ValueError` if they are not of one model."""
        if any(getattr(geometry, name) != getattr(reader, name) for name in ("layers", "heads", "head_dim")):
            raise ValueError(f"blocks of {geometry} cannot become pages of {reader}")
        self._store = store
        self._geometry = geometry
        self._converter = Converter(geometry, reader)
        self._page = Scratch()

    def lookup(self, refs: Sequence[BlockRef]) -> int:
        return self._store.lookup(refs)

    def renew(
        self, refs: Sequence[BlockRef], ttl_s: float, *, used_at: float | None = None, reused: bool = False
    ) -> int:
        return self._store.renew(refs, ttl_s, used_at=used_at, reused=reused)

    def load(self, ref: BlockRef, into: memoryview, patience: Patience | None = None) -> bool:
        """Fills `into`, a page of the reader's form. False: a miss."""
        page = self._page.take(self._geometry.page_bytes(ref.num_tokens))
        if not self._store.load(ref, page.data, patience):
            return False
        try:
            self._converter.convert(page.data, into, ref.num_tokens)
        except NotFinitePage:
            return False  # the reader has no scale for it
        return True

    def save(
        self,
        ref: BlockRef,
        page: memoryview,
        ttl_s: float,
        *,
        used_at: float | None = None,
        everywhere: bool = True,
        quickly: bool = False,
    ) -> bool:
        """Always raises `Internal`: what the reader computes is no block of this store, and would be read as one."""
        raise Internal("a reader of another arithmetic may not write to this store")


class Converter:
    """Pages of one form into pages of another. Thread-safe."""

    def __init__(self, geometry: Geometry, reader: Geometry) -> None:
        self._geometry = geometry
        self._reader = reader
        plain = Geometry(reader.layers, reader.heads, reader.head_dim, reader.dtype, reader.quantisation)
        self._quantiser = None if reader.quantisation is Quantisation.NONE else Quantiser(plain)
        self._plain = plain
        self._floats, self._words = Scratch(), Scratch()

    def convert(self, page: memoryview, into: memoryview, tokens: int) -> None:
        """Raises `NotFinitePage` where the reader quantises and the page is not finite."""
        shape = (self._geometry.layers * 2, self._geometry.heads, tokens, self._geometry.head_dim)
        floats: NDArray[np.float32] = self._floats.take(4 * int(np.prod(shape))).view(np.float32).reshape(shape)
        page_floats(self._geometry, page, tokens, floats)
        if self._quantiser is None:
            write_page(floats, self._reader.dtype, into)
            return
        rounded = self._words.take(self._plain.page_bytes(tokens))
        write_page(floats, self._plain.dtype, rounded.data)
        payload = self._quantiser.pack(rounded.data, tokens)
        into[: len(payload)] = payload
        if not self._reader.holds_quantised:
            self._quantiser.unpack(into, tokens)
