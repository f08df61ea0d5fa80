"""The benches of the engine's goals measure what they say."""

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from services.bench import decode, quality
from services.bench.load import gaps_ms
from services.bench.memory import _peak_mb
from services.bench.stream import Stream
from services.engine.model import Span
from services.settings import Compute, Settings
from tests.models.default_model import DATA_DIR
from tests.pipeline.tiny import tiny_model


@pytest.fixture(scope="module")
def settings() -> Settings:
    plain = Settings(compute=Compute(dtype="int8"))
    return replace(plain, kv=replace(plain.kv, data_dir=str(DATA_DIR)))


def test_a_shared_prefix_is_held_once(settings: Settings) -> None:
    first, medians = decode.shared_prefix(settings, 1, num_sequences=3, num_prefix=128, num_steps=2, rounds=1)
    assert first["round"] == 1
    own_tail = 3 * 1  # the page that the steps write to, of each
    assert (medians["pages_shared"], medians["pages_own"]) == (2 + own_tail, 3 * 2 + own_tail)
    assert float(medians["own_to_shared"]) > 0


def test_int8_pages_are_about_half_as_large(settings: Settings) -> None:
    (row,) = decode.kv_forms(settings, 1, [2], ctx_tokens=64, num_steps=2, rounds=1)
    assert float(row["plain_bytes_a_token"]) / float(row["int8_bytes_a_token"]) == pytest.approx(1.88, abs=0.01)
    assert float(row["plain_to_int8"]) > 0


def test_the_text_is_the_same_and_long_enough(settings: Settings) -> None:
    ids = quality.text_ids(settings, 1024)
    assert len(ids) == 1024 and ids[:300] == quality.text_ids(settings, 300)


def test_logits_of_a_text_are_those_of_one_pass() -> None:
    model = tiny_model("float32")
    ids = [3 + k % 200 for k in range(300)]
    pages = range(-(-len(ids) // 64))
    whole = model.forward(ids, [Span(0, len(ids), pages)], model.new_pool(len(pages), 64), None)
    assert torch.equal(torch.from_numpy(quality.logits_of(model, ids)), whole)


def test_distances_of_known_distributions() -> None:
    expected = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32))
    ids = [0, 1, 2]
    same = quality.distance(expected, expected, ids)
    assert (same.kl, same.top1) == (0.0, 1.0)
    assert same.perplexity == pytest.approx(math.exp(-(math.log(0.25) + math.log(0.25)) / 2))
    found = quality.distance(other, expected, ids)
    assert found.kl == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 3)
    assert found.top1 == pytest.approx(2 / 3)
    logits = expected + 7.0
    assert np.allclose(quality.log_softmax(logits), expected, atol=1e-6)


def test_gaps_begin_behind_the_hand_off_and_peaks_are_read() -> None:
    assert gaps_ms(Stream([1.0, 9.0, 9.5, 9.75], 0.5)) == [500.0, 250.0]
    assert _peak_mb("Name:\tx\nVmHWM:\t  1000 kB\nVmRSS:\t  900 kB\n") == 1.024
