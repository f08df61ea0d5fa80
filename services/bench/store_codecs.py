"""What codecs and quantisations save on real KV, what they cost, and what rounding K and V does to the answers."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kernels.torch_arithmetic import TorchArithmetic
from kvstore.blob import BlobFormat
from kvstore.codec import CODECS, BlockCodec
from kvstore.keys import BlockRef, Identity, block_refs, root_of
from schemas.blob import HEADER_BYTES, Quantisation
from services.bench.passages import PASSAGES
from services.engine.arithmetic import choose_arithmetic
from services.engine.model import Model, Span
from services.engine.storage import geometry_of
from services.text.model import TextModel

CHUNK_TOKENS = 256
ROUNDS = 7

Row = dict[str, str | int | float]


def prose(text: TextModel, max_tokens: int) -> list[int]:
    return text.tokenizer.encode("\n".join(PASSAGES))[:max_tokens]


def codec_rows(model: Model, ids: Sequence[int], block_tokens: int) -> Iterator[Row]:
    """One row for each quantisation and codec: how much smaller than the page a blob is, header and scales counted,
    and GB/s of pages in and out of blobs, the digest included, on one core.

    `model` is one without quantisation; `ids` are at least one block of tokens.
    """
    for quantisation in Quantisation:
        rounded = with_quantisation(model, quantisation)
        pages = _pages(rounded, ids, block_tokens)
        refs = block_refs(root_of(_identity(rounded, block_tokens), "bench"), ids, block_tokens)
        for codec in CODECS.values():
            yield _codec_row(rounded, pages, refs, codec, block_tokens)


def kl_rows(model: Model, ids: Sequence[int], quantisations: Sequence[Quantisation]) -> Iterator[Row]:
    """One row for each quantisation: the divergence from `model`, which has none, in nats a token.

    `kl_stored`: the first half of `ids` was loaded from quantised blocks, and the second half attends to it.
    `kl_served`: what a worker computes, whose K and V are rounded from the first token on, in every layer.
    """
    plain = torch.cat(list(_logits(model, ids)))
    for quantisation in quantisations:
        rounded = with_quantisation(model, quantisation)
        served = torch.cat(list(_logits(rounded, ids)))
        stored = _after_stored_half(model, rounded, ids)
        yield {
            "quantisation": quantisation.name.lower(),
            "dtype": model.arithmetic.kind,
            "tokens": len(ids),
            "kl_stored": float(divergence(plain[-len(stored) :], stored).mean()),
            "kl_served": float(divergence(plain, served).mean()),
            "same_best_token": float((plain.argmax(-1) == served.argmax(-1)).float().mean()),
        }


def divergence(expected: Tensor, found: Tensor) -> Tensor:
    """KL(expected || found) of each row of logits `[R, V]`, in nats."""
    wanted, given = (torch.log_softmax(logits.double(), -1) for logits in (expected, found))
    return (wanted.exp() * (wanted - given)).sum(-1)


def with_quantisation(model: Model, quantisation: Quantisation) -> Model:
    return model.with_arithmetic(choose_arithmetic(model.config, model.arithmetic.kind, quantisation.name.lower()))


def _logits(model: Model, ids: Sequence[int]) -> Iterator[Tensor]:
    """Of all of `ids`, a chunk at a time."""
    pool = model.new_pool(-(-len(ids) // CHUNK_TOKENS), CHUNK_TOKENS)
    for start, end in pairwise([*range(0, len(ids), CHUNK_TOKENS), len(ids)]):
        span = Span(start, end - start, range(start // CHUNK_TOKENS + 1))
        yield model.forward(ids[start:end], [span], pool, None)


def _after_stored_half(model: Model, rounded: Model, ids: Sequence[int]) -> Tensor:
    """Logits of the second half of `ids`, the first being rounded after it was computed."""
    half = len(ids) // 2
    pool = model.new_pool(2, -(-len(ids) // 32) * 16)
    page_tokens = pool.shape[4]
    model.forward(ids[:half], [Span(0, half, range(2))], pool, [])
    assert isinstance(rounded.arithmetic, TorchArithmetic)
    pool.copy_(rounded.arithmetic.as_stored(pool.float()))
    assert half <= page_tokens
    return model.forward(ids[half:], [Span(half, len(ids) - half, range(2))], pool, None)


def _pages(model: Model, ids: Sequence[int], block_tokens: int) -> list[memoryview]:
    """The full blocks of `ids` as the engine holds them."""
    num_pages = len(ids) // block_tokens
    pool = model.new_pool(num_pages, block_tokens)
    model.forward(ids[: num_pages * block_tokens], [Span(0, num_pages * block_tokens, range(num_pages))], pool, [])
    return [memoryview(page.view(torch.uint8).numpy().reshape(-1)) for page in pool]


def _identity(model: Model, block_tokens: int) -> Identity:
    geometry = geometry_of(model)
    return Identity(
        fingerprint=bytes(8),
        tokenizer_hash=bytes(8),
        arithmetic=model.arithmetic.id,
        dtype=geometry.dtype,
        block_tokens=block_tokens,
        quantisation=geometry.quantisation,
    )


def _codec_row(
    model: Model, pages: Sequence[memoryview], refs: Sequence[BlockRef], codec: BlockCodec, block_tokens: int
) -> Row:
    form = BlobFormat(_identity(model, block_tokens), geometry_of(model), codec)
    blobs = [b"".join(form.seal(ref, page)) for ref, page in zip(refs, pages, strict=False)]
    page_bytes = len(pages[0])
    buffer = np.empty(page_bytes, np.uint8).data

    def decode(number: int) -> None:
        stored = memoryview(blobs[number])[HEADER_BYTES:]
        buffer[: len(stored)] = stored
        form.open(refs[number], memoryview(blobs[number])[:HEADER_BYTES], buffer, len(stored))

    numbers = range(len(pages))
    encode_s = _fastest_s(lambda number: form.seal(refs[number], pages[number]), numbers)
    decode_s = _fastest_s(decode, numbers)
    assert bytes(buffer) == bytes(pages[-1]), "a block did not come back as it was"
    return {
        "codec": codec.id.name.lower(),
        "quantisation": model.arithmetic.quantisation,
        "dtype": model.arithmetic.kind,
        "block_tokens": block_tokens,
        "blocks": len(pages),
        "times_smaller": round(page_bytes * len(pages) / sum(map(len, blobs)), 4),
        "encode_gb_s": round(page_bytes / encode_s / 1e9, 3),
        "decode_gb_s": round(page_bytes / decode_s / 1e9, 3),
    }


def _fastest_s(call: Callable[[int], object], numbers: Sequence[int]) -> float:
    """The mean over `numbers` of each one's fastest of some rounds."""
    times = []
    for number in numbers:
        rounds = []
        for _ in range(ROUNDS):
            started_s = time.perf_counter()
            call(number)
            rounds.append(time.perf_counter() - started_s)
        times.append(min(rounds))
    return sum(times) / len(times)
