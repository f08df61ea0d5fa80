"""How far an arithmetic's logits are from those of transformers in float32, on a fixed text; beside llama.cpp's.

All of them have the same weights: those of the model's file, whatever each makes of its quantised products.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.bench.engine import load_model
from services.bench.passages import PASSAGES
from services.bench.peer import Peer
from services.engine.model import Model, Span
from services.models.registry import resolve
from services.settings import Settings
from services.text.model import load_text

Logits = npt.NDArray[np.float32]
Row = dict[str, str | int | float]

PAGE_TOKENS = 64
CHUNK_ROWS = 256


class Distance(NamedTuple):
    """Of predictions of a text from a reference's: means over its tokens, in nats."""

    perplexity: float
    kl: float
    top1: float

    def row(self) -> dict[str, float]:
        return {"perplexity": round(self.perplexity, 4), "kl": round(self.kl, 6), "top1": round(self.top1, 4)}


def text_ids(settings: Settings, num_tokens: int) -> list[int]:
    """The first tokens of the fixed text."""
    text = load_text(resolve(settings.compute.model, settings.kv.data_dir))
    ids = text.tokenizer.encode("\n\n".join(PASSAGES))
    return list(ids)[: min(num_tokens, text.context_tokens)]


def run(settings: Settings, ids: list[int], reference: Peer, rivals: list[Peer], dtypes: list[str]) -> Iterator[Row]:
    """One row an engine; the first is the reference's own."""
    expected = log_softmax(reference.logits(ids))
    yield {"engine": reference.engine, "tokens": len(ids), **distance(expected, expected, ids).row()}
    for rival in rivals:
        yield {"engine": rival.engine, **distance(log_softmax(rival.logits(ids)), expected, ids).row()}
    for dtype in dtypes:
        model = load_model(settings, dtype)
        found = log_softmax(logits_of(model, ids))
        yield {"engine": f"kvrelay {model.arithmetic.name}", **distance(found, expected, ids).row()}


def logits_of(model: Model, ids: list[int]) -> Logits:
    """`[T, V]`, in chunks as prefill computes them."""
    pages = range(-(-len(ids) // PAGE_TOKENS))
    pool = model.new_pool(len(pages), PAGE_TOKENS)
    chunks = []
    for start in range(0, len(ids), CHUNK_ROWS):
        rows = ids[start : start + CHUNK_ROWS]
        span = Span(start, len(rows), pages[: -(-(start + len(rows)) // PAGE_TOKENS)])
        chunks.append(model.forward(rows, [span], pool, None).numpy())
    return np.concatenate(chunks)


def log_softmax(logits: Logits) -> Logits:
    """In place."""
    for number in range(len(logits)):
        logits[number] -= logits[number].max()
        logits[number] -= np.log(np.exp(logits[number], dtype=np.float64).sum())
    return logits


def distance(found: Logits, expected: Logits, ids: list[int]) -> Distance:
    """Both log-probabilities `[T, V]`. Perplexity is that of the text's next tokens."""
    nexts = np.array(ids[1:])
    nll = -found[np.arange(len(nexts)), nexts].astype(np.float64)
    pairs = zip(expected, found, strict=True)
    kl = [float((np.exp(p, dtype=np.float64) * (p.astype(np.float64) - q)).sum()) for p, q in pairs]
    top1 = found.argmax(axis=1) == expected.argmax(axis=1)
    return Distance(float(np.exp(nll.mean())), float(np.mean(kl)), float(top1.mean()))
