"""Pinned prompts: computed without being asked for, kept, shared where the operator says so, and nowhere else."""

import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.keys import SHARED_TENANT, BlockRef
from kvstore.nvme_inventory import NvmeInventory
from kvstore.pins import FOLDER, Pin, PinBook, new_pin, pinned_ids
from services.text.model import TextModel
from services.text.pinned import pinned_ids as tokens_of
from services.worker.pinned import PIN_AHEAD_S
from tests.bus.polling import until
from tests.pipeline.conftest import Pipelines
from tests.pipeline.local import LocalPipeline
from tests.pipeline.tiny import tiny_files

BLOCK = 16
_numbers = itertools.count(10)
GREEDY: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}


def chat(question: str, system: str) -> dict[str, Any]:
    said = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": said, **GREEDY}


class Pins:
    """What `kvrelay kv pin` does, for the tiny model."""

    def __init__(self, root: Path) -> None:
        self.book = PinBook(root)
        self.inventory = NvmeInventory(root)
        # Its own for each test: a pin is computed once a minute on a broker, whatever store it is pinned in.
        self.system = f"{next(_numbers)} words are too many: answer in one, and never say why. Be brief and kind."

    def pin(self, text: TextModel, tenant: str = "default") -> Pin:
        pin = new_pin("system", text.slug, tenant, "", self.system, time.time())
        self.book.add(pin, pinned_ids(tiny_files().tokenizer_hash, self.ids(text)))
        return pin

    def ids(self, text: TextModel) -> list[int]:
        return tokens_of("system", self.system, text)

    def refs(self, pipeline: LocalPipeline, pin: Pin) -> list[BlockRef]:
        return dict(self._all(pipeline))[pin.id]

    def _all(self, pipeline: LocalPipeline) -> list[tuple[str, list[BlockRef]]]:
        identity = pipeline.prefill.blocks._identity
        return [(pin.id, refs) for pin, refs in self.book.refs(pipeline.text.slug, identity)]

    def kept(self, pipeline: LocalPipeline, pin: Pin) -> Callable[[], Awaitable[bool]]:
        """Whether all of it is stored, and dated ahead."""

        async def condition() -> bool:
            entries = [self.inventory.find(ref.name) for ref in self.refs(pipeline, pin)]
            ahead = time.time() + PIN_AHEAD_S / 2
            return bool(entries) and all(entry is not None and entry.life.used_at > ahead for entry in entries)

        return condition


@pytest.fixture
def pins(tmp_path: Path) -> Pins:
    return Pins(tmp_path / "kv")


def known_to(pipeline: LocalPipeline, number: int) -> Callable[[], Awaitable[bool]]:
    """Whether both workers know so many pins."""

    async def condition() -> bool:
        return all(len(runtime.pinned.prefixes) == number for runtime in (pipeline.prefill, pipeline.decode))

    return condition


async def test_a_pin_is_computed_and_kept_and_only_its_tenant_has_it(tiny_pipelines: Pipelines, pins: Pins):
    async with tiny_pipelines() as pipeline:
        pin = pins.pin(pipeline.text, "acme")
        await until(pins.kept(pipeline, pin))
        whole = len(pins.ids(pipeline.text)) // BLOCK * BLOCK
        answers = {tenant: await pipeline.ask(tenant, **chat("Why?", pins.system)) for tenant in ("acme", "bolt")}
        assert {tenant: answer.start.cached_tokens for tenant, answer in answers.items()} == {"acme": whole, "bolt": 0}
        assert answers["acme"].essence == answers["bolt"].essence
        assert await pins.kept(pipeline, pin)(), "use does not shorten its life"


async def test_a_shared_pin_is_everybodys_and_what_follows_is_not(
    tiny_pipelines: Pipelines, pins: Pins, tmp_path: Path
):
    """CASES 4: only what the operator marked public is shared, to the block."""
    question = "What is the name of the man who never says why he does a thing that nobody asked of him?"
    async with tiny_pipelines() as pipeline:
        unshared = await pipeline.ask("cold", **chat(question, pins.system))
        pin = pins.pin(pipeline.text, SHARED_TENANT)
        await until(pins.kept(pipeline, pin))
        await until(known_to(pipeline, 1))
        whole = len(pins.ids(pipeline.text)) // BLOCK * BLOCK
        first, again = [await pipeline.ask("acme", **chat(question, pins.system)) for _ in range(2)]
        other = [await pipeline.ask("bolt", **chat(question, pins.system), cache_salt=salt) for salt in ("", "mine")]
        asked = first.start.prompt_tokens
        assert [a.start.cached_tokens for a in (first, again, *other)] == [whole, asked - 1, whole, whole]
        assert [a.essence for a in (first, again, *other)] == [unshared.essence] * 4
        near = await pipeline.ask("bolt", **chat(question, pins.system[:40] + "!" + pins.system[40:]))
        assert near.start.cached_tokens == (1 + len("system\n") + 40) // BLOCK * BLOCK
    names = {
        tenant: {path.name for path in (tmp_path / "kv" / "blocks" / tenant).rglob("*.kvb")}
        for tenant in ("acme", "bolt", SHARED_TENANT)
    }
    assert len(names[SHARED_TENANT]) == whole // BLOCK
    assert not names["acme"] & names["bolt"] and not (names["acme"] | names["bolt"]) & names[SHARED_TENANT]


async def test_a_pin_outlives_its_blocks_and_its_build(tiny_pipelines: Pipelines, pins: Pins):
    """Who starts on an emptied store, or stores under another identity, computes them again by himself."""
    async with tiny_pipelines() as pipeline:
        pin = pins.pin(pipeline.text)
        await until(pins.kept(pipeline, pin))
        lost = pins.refs(pipeline, pin)
    for ref in lost:
        assert pins.inventory.remove(ref.name)
    async with tiny_pipelines(kv={"block_tokens": 32}, scheduler={"chunk_tokens": 64}) as later:
        await until(pins.kept(later, pin))
        assert not {ref.key for ref in lost} & {ref.key for ref in pins.refs(later, pin)}
        answer = await later.ask(**chat("Why?", pins.system))
        assert answer.start.cached_tokens == len(pins.ids(later.text)) // 32 * 32


async def test_what_is_unpinned_is_shared_no_more(tiny_pipelines: Pipelines, pins: Pins):
    async with tiny_pipelines() as pipeline:
        pin = pins.pin(pipeline.text, SHARED_TENANT)
        await until(pins.kept(pipeline, pin))
        await until(known_to(pipeline, 1))
        assert pins.book.remove(pin.id)
        await until(known_to(pipeline, 0))
        assert (await pipeline.ask("acme", **chat("Why?", pins.system))).start.cached_tokens == 0


async def test_a_pin_counts_only_while_text_and_tokens_fit(
    tiny_pipelines: Pipelines, pins: Pins, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Pinned tokens that are sound in themselves, but of another text, would share what nobody made public."""
    async with tiny_pipelines() as pipeline:
        pin = new_pin("system", pipeline.text.slug, SHARED_TENANT, "", pins.system, time.time())
        other = tokens_of("system", pins.system.upper(), pipeline.text)
        with caplog.at_level(logging.WARNING):
            pins.book.add(pin, pinned_ids(tiny_files().tokenizer_hash, other))
            changed = pins.pin(pipeline.text, "acme")
            await until(known_to(pipeline, 1))
        assert "comes out in other tokens" in caplog.text
        assert pipeline.prefill.pinned.prefixes[0].pin == changed
        assert pipeline.prefill.blocks.shared.prefixes == ()
        (tmp_path / "kv" / FOLDER / f"{changed.id}.json").write_bytes(b"{}")
        pins.book.add(pin, pinned_ids(tiny_files().tokenizer_hash, pins.ids(pipeline.text)))
        await until(lambda: _shares(pipeline))
        assert [prefix.pin for prefix in pipeline.prefill.pinned.prefixes] == [pin]


async def _shares(pipeline: LocalPipeline) -> bool:
    return len(pipeline.prefill.blocks.shared.prefixes) == 1


async def test_a_pinned_text_that_goes_on_in_the_middle_of_a_token(pipelines: Pipelines, pins: Pins):
    """CASES 12: "ti" + "me" is one token, so the block that the seam is in is no hit; the one before is."""
    begun = " the" * 28 + " Once upon a ti"
    async with pipelines(kv={"block_tokens": BLOCK}) as pipeline:
        text = pipeline.text
        assert len(tokens_of("prompt", begun, text)) == 2 * BLOCK
        pin = new_pin("prompt", text.slug, SHARED_TENANT, "", begun, time.time())
        hash_ = pipeline.prefill.blocks._identity.tokenizer_hash
        pins.book.add(pin, pinned_ids(hash_, tokens_of("prompt", begun, text)))
        await until(pins.kept(pipeline, pin))
        await until(known_to(pipeline, 1))
        seam = await pipeline.ask(prompt=begun + "me", **GREEDY)
        cold = await pipeline.ask(prompt=begun + "me", **GREEDY, cache_salt="of its own")
        safe = await pipeline.ask("acme", prompt=begun + " and", **GREEDY)
        assert seam.start.prompt_tokens == 2 * BLOCK
        assert [answer.start.cached_tokens for answer in (seam, cold, safe)] == [BLOCK, BLOCK, 2 * BLOCK]
    async with pipelines(data_dir=Path(str(pins.inventory.root) + "-fresh"), kv={"block_tokens": BLOCK}) as fresh:
        assert (await fresh.ask(prompt=begun + "me", **GREEDY)).essence == seam.essence == cold.essence
