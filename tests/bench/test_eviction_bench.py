"""What the replay of a trace counts, and that the limits are what a perfect policy would reach."""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import SetupError
from services.bench.eviction import Lru, Ours, belady, hits, run
from services.bench.trace import Request, made_up_trace, read_trace
from tests.cli.test_cli_commands import kvrelay


def requests(*chains: list[int], every_s: float = 30.0) -> list[Request]:
    return [Request(every_s * number, chain) for number, chain in enumerate(chains)]


def test_a_hit_is_a_prefix_that_is_there() -> None:
    """A block behind a gap is no hit: it would be computed again."""
    policy = Lru(10)
    policy.use([2, 3], 0.0)
    assert hits(policy, requests([1, 2, 3], [1, 2, 3], [1, 2, 9, 3])) == 3 + 2


def test_blocks_of_a_second_job_outlive_a_flood_of_new_ones() -> None:
    """LRU loses what is asked for now and then; ours keeps it. A block whose tombstone is known counts as reused."""
    flood = [[100 + number] for number in range(40)]
    asked = requests([1, 2], [1, 2], *flood, [1, 2])
    assert (hits(Lru(10), asked), hits(Ours(10), asked)) == (2, 4)
    late = requests([1, 2], *flood[:20], [1, 2], *flood[20:], [1, 2])
    assert (hits(Lru(10), late), hits(Ours(10), late)) == (0, 2)


# Chains as a trie would have them: the id of a block says everything before it.
tries = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6)


def chained(paths: list[list[int]]) -> list[list[int]]:
    return [[int("1" + "".join(map(str, path[: i + 1]))) for i in range(len(path))] for path in paths]


def optimum(accesses: tuple[int, ...], num_blocks: int) -> int:
    """By trying every decision."""

    @cache
    def best(index: int, stored: frozenset[int]) -> int:
        if index == len(accesses):
            return 0
        block = accesses[index]
        if block in stored:
            return 1 + best(index + 1, stored)
        kept = [stored]
        kept += [stored | {block}] if len(stored) < num_blocks else [stored - {victim} | {block} for victim in stored]
        return max(best(index + 1, choice) for choice in kept)

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(tries, st.integers(1, 4))
def test_nobody_beats_belady(paths: list[list[int]], num_blocks: int) -> None:
    chains = chained(paths)
    asked = requests(*chains)
    best = belady(num_blocks, asked)
    assert best == optimum(tuple(block for chain in chains for block in chain), num_blocks)
    for policy in (Lru(num_blocks), Ours(num_blocks)):
        assert hits(policy, asked) <= best


def test_ours_holds_its_own_on_a_made_up_trace() -> None:
    """The published trace is not ours to ship: `kvrelay bench store eviction --trace FILE` checks the limits on it."""
    (row,) = run(made_up_trace(2000), [1000])
    assert float(row["ours_minus_lru"]) >= -0.01
    assert 0.2 < float(row["ours"]) < float(row["belady"])


def test_equal_timestamps_are_spread(tmp_path: Path) -> None:
    lines = [{"timestamp": at, "hash_ids": [1, 2], "input_length": 3} for at in (0, 0, 0, 3000, 6000)]
    (tmp_path / "trace").write_bytes(b"\n".join(json.dumps(line).encode() for line in lines) + b"\n\n")
    assert [request.at_s for request in read_trace(tmp_path / "trace")] == [0, 1, 2, 3, 6]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "no requests"),
        (b'{"timestamp": 1, "hash_ids": []}\n{"timestamp": 1}', ":2 is no request"),
        (b"x", ":1 is"),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "trace").write_bytes(text)
    with pytest.raises(SetupError, match=words):
        read_trace(tmp_path / "trace")
    with pytest.raises(SetupError, match="cannot be read"):
        read_trace(tmp_path / "nothing")


def test_the_command(tmp_path: Path) -> None:
    trace = [{"timestamp": 1000 * number, "hash_ids": [1, 2, 100 + number]} for number in range(20)]
    (tmp_path / "trace").write_bytes("\n".join(map(json.dumps, trace)).encode())
    done = kvrelay("bench", "store", "eviction", "--trace", "trace", "--blocks", "5,10", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["blocks"], row["accesses"], row["belady"]) for row in rows] == [(5, 60, 0.6333), (10, 60, 0.6333)]
    wrong = kvrelay("bench", "store", "eviction", "--trace", "nowhere", cwd=tmp_path)
    assert wrong.returncode == 2 and "nowhere cannot be read" in wrong.stderr
