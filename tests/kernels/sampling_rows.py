"""Rows of scores that a sampler may meet, and ways to draw from them."""

import numpy as np
from hypothesis import strategies as st

from kernels.reference.sampling import Draw, Mask, Row


def row(seed: int, vocab: int = 1000, scale: float = 3.0) -> Row:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def _shaped(seed: int, vocab: int, shape: str) -> Row:
    rng = np.random.default_rng(seed)
    scores = row(seed, vocab)
    match shape:
        case "ties":
            scores = np.round(scores).astype(np.float32)
        case "flat":
            scores[:] = np.float32(rng.standard_normal())
        case "nearly flat":
            scores = (np.float32(7) + rng.integers(0, 3, vocab).astype(np.float32) * np.float32(2**-21)).astype(
                np.float32
            )
        case "steep":
            scores *= np.float32(30)
        case "holes":
            scores[rng.random(vocab) < 0.7] = -np.inf
            scores[rng.integers(vocab)] = 2.0
        case "zeros of both signs":
            scores = np.where(rng.random(vocab) < 0.5, np.float32(0.0), np.float32(-0.0))
        case "tiny":
            scores = (scores * np.float32(1e-42)).astype(np.float32)
        case "huge":
            scores = (scores * np.float32(1e37)).astype(np.float32)
        case "one alone":
            scores[:] = -np.inf
            scores[rng.integers(vocab)] = np.float32(-3e38)
        case "spoilt":
            scores[rng.integers(vocab)] = rng.choice(np.array([np.nan, np.inf, -np.nan, -np.inf], dtype=np.float32))
    return scores


SHAPES = ("plain", "ties", "flat", "nearly flat", "steep", "holes", "zeros of both signs", "tiny", "huge")

rows = st.builds(
    _shaped,
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 15, 16, 17, 63, 160, 1000, 5003, 9001]),
    st.sampled_from([*SHAPES, "one alone", "spoilt"]),
)

draws = st.builds(
    Draw,
    greedy=st.sampled_from([False, False, False, True]),
    inv_temperature=st.sampled_from([1.0, 0.5, 1.5, 1e5, 3.3]).map(lambda x: float(np.float32(x))),
    top_k=st.sampled_from([0, 0, 0, -1, 1, 2, 5, 50, 900, 10_000]),
    top_p=st.one_of(st.sampled_from([0.0, 1.0, 1.0, 0.9, 0.5, 1e-9, 1.0 - 2.0**-53]), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.sampled_from([0.0, 0.0, 1.0, 0.1, 1e-13]), st.floats(0.0, 1.0)),
    hash=st.one_of(st.sampled_from([0, 2**64 - 1, 2**63]), st.integers(0, 2**64 - 1)),
    allowed=st.none(),
)


def mask_of(ids: set[int], size: int) -> Mask:
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
