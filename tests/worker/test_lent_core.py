"""A native model on a core that a neighbour lends it: two threads while that one idles, its own when not, same bits."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from kernels.int8_arithmetic import Int8Arithmetic
from schemas.job import Sampling
from services.engine.engine import Work
from services.engine.loading import load_model
from services.engine.sampler import Sampler
from services.worker.cores import lending_is_possible, map_path
from services.worker.runtime import Runtime
from tests.model.test_families import SIZES
from tests.model.tiny import tiny_model
from tests.model.tiny_gguf_model import save_gguf
from tests.pipeline.local import settings_for
from tests.pipeline.tiny import tiny_files, tiny_pipeline_text
from tests.worker.test_cores import Process

pytestmark = pytest.mark.skipif(
    not lending_is_possible() or not Path("/proc/self/schedstat").exists() or len(os.sched_getaffinity(0)) < 2,
    reason="two cores, open-file locks, and a count of how often a thread ran",
)
NUM_TOKENS = 30
PROMPT = [3 + 7 * k % 200 for k in range(100)]


class Thread:
    """Of this process, by what the system says of it."""

    def __init__(self, number: str) -> None:
        self._folder = Path("/proc/self/task") / number

    def num_runs(self) -> int:
        """How often it was given a core, once it waits for more to do."""
        deadline_s = time.monotonic() + 30
        while (self._folder / "stat").read_text("ascii").rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline_s
        return int((self._folder / "schedstat").read_text("ascii").split()[2])


class Borrower:
    """A worker's engine and its one helper thread, which is there for the core that it may be lent."""

    def __init__(self, folder: Path, neighbour: int) -> None:
        text = tiny_pipeline_text()
        made = save_gguf(folder / "tiny.gguf", tiny_model(**SIZES, vocab_size=text.vocab_size), Type.Q4_1)
        files = msgspec.structs.replace(tiny_files(), config=made.config, weights=made.weights)
        settings = settings_for(folder, kv={"block_tokens": 16}, compute={"neighbours": str(neighbour)})
        before = threads()
        model = load_model(files, Int8Arithmetic(), lent=[neighbour])
        (helper,) = threads() - before
        self.helper = Thread(helper)
        self.runtime = Runtime(settings, files, text, model)

    def answer(self) -> tuple[list[int], Tensor, list[bool]]:
        """Its tokens, its K and V, and for each pass whether the helper took part."""
        sampler = Sampler(Sampling(temperature=1.0, max_tokens=NUM_TOKENS), 5, 0, PROMPT)
        pages = list(range(-(-(len(PROMPT) + NUM_TOKENS) // 16)))
        rows, start, tokens, helped = list(PROMPT), 0, [], []
        while len(tokens) < NUM_TOKENS:
            before = self.helper.num_runs()
            (outcome,) = self.runtime.engine.run_now([Work(rows, start, pages, [sampler], len(tokens))])
            helped.append(self.helper.num_runs() > before)
            start += len(rows)
            assert isinstance(outcome, list)
            rows = [outcome[0].id]
            tokens += rows
        slots = self.runtime.pool.data[pages].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        return tokens, slots[:, :, :, :start].view(torch.int16), helped


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


@pytest.fixture
def cores() -> Iterator[tuple[int, int]]:
    """Two, of which this thread has the first."""
    before, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    own, neighbour = sorted(before)[:2]
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {own})
    yield own, neighbour
    os.sched_setaffinity(0, before)
    torch.set_num_threads(num_threads)


def test_two_threads_while_the_neighbour_idles_and_one_when_not(cores: tuple[int, int], tmp_path: Path) -> None:
    own, neighbour = cores
    borrower, owner = Borrower(tmp_path, neighbour), Process(map_path(tmp_path), [neighbour], [own])
    try:
        owner.ask("begin")
        alone = borrower.answer()
        assert alone[2] == [False] * NUM_TOKENS, "its owner computes"
        owner.ask("end")
        deadline_s = time.monotonic() + 30
        while not any((together := borrower.answer())[2]):
            assert time.monotonic() < deadline_s
        owner.ask("begin")
        again = borrower.answer()
        assert again[2] == [False] * NUM_TOKENS, "it was taken back"
    finally:
        owner.kill()
        borrower.runtime.close()
    for tokens, slots, _ in (together, again):
        assert tokens == alone[0] and torch.equal(slots, alone[1])
