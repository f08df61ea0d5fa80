"""What a page of KV memory is made of, so that kernels, pools and the store agree on where a value lies.

A page is the payload of one uncompressed blob: layer -> (K, V) -> kv head -> token -> dim. Quantised, each (K, V) of a
layer is its values `[H, T, D]` (int4: `[H, T, D / 2]` bytes, the even dim in the low nibble), then its float32 scales
`[H, T]`: value = whole number * scale.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 4
_VALUE_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class PageForm:
    """Of pages that hold `dtype`, or, with a `quantisation` other than "none", whole numbers and scales.

    A pool is `[P, L, 2, H, T, D]` of `dtype`; quantised it is `[P, L, 2, bytes of T tokens] uint8`.
    """

    layers: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    quantisation: str = "none"

    @property
    def is_quantised(self) -> bool:
        return self.quantisation != "none"

    @property
    def value_bytes(self) -> int:
        """Of the D values of a token in a head."""
        if not self.is_quantised:
            return self.head_dim * self.dtype.itemsize
        return self.head_dim * _VALUE_BITS[self.quantisation] // 8

    @property
    def token_bytes(self) -> int:
        """Of a token in all heads and layers, K and V."""
        scale_bytes = SCALE_BYTES if self.is_quantised else 0
        return self.layers * 2 * self.kv_heads * (self.value_bytes + scale_bytes)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_tokens

    @property
    def pool_dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_quantised else self.dtype

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        if self.is_quantised:
            return num_pages, self.layers, 2, self.page_bytes // (2 * self.layers)
        return num_pages, self.layers, 2, self.kv_heads, self.page_tokens, self.head_dim

    def empty_pool(self, num_pages: int) -> Tensor:
        """Not zeroed: the operating system gives memory when a page is first written, so unused ones cost none."""
        return torch.empty(self.pool_shape(num_pages), dtype=self.pool_dtype)

    def tokens_in(self, pool: Tensor) -> int:
        """Of a page of `pool`, which may be of any number of tokens."""
        return math.prod(pool.shape[1:]) * pool.dtype.itemsize // self.token_bytes

    def fits(self, pool: Tensor) -> bool:
        return pool.shape == self.pool_shape(pool.shape[0]) and pool.dtype == self.pool_dtype and pool.is_contiguous()

    def values(self, pool: Tensor) -> Tensor:
        """A view `[P, L, 2, H, T, bytes of a token] uint8` of a quantised pool: int8 values, or two int4 a byte."""
        pages, layers, both, _ = pool.shape
        size = self.kv_heads * self.page_tokens * self.value_bytes
        return pool[..., :size].view(pages, layers, both, self.kv_heads, self.page_tokens, self.value_bytes)

    def scales(self, pool: Tensor) -> Tensor:
        """A view `[P, L, 2, H, T] float32` of a quantised pool."""
        pages, layers, both, _ = pool.shape
        size = self.kv_heads * self.page_tokens * SCALE_BYTES
        return pool[..., -size:].view(torch.float32).view(pages, layers, both, self.kv_heads, self.page_tokens)
