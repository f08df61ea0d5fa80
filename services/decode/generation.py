"""A choice that is being generated: its sequence in the batch, and what goes with it."""

import time

from schemas.handoff import Handoff
from services.decode.chain import Chain
from services.engine.blocks import Restored
from services.engine.choice import Choice
from services.engine.drafter import Drafter
from services.engine.engine import Outcome
from services.engine.recheck import Difference, Recheck
from services.engine.sampler import Sampled, Sampler
from services.engine.saver import Saver
from services.engine.sequence import Sequence
from services.text.grammar import Grammar
from services.worker.runtime import Runtime


def _ignore(_: Outcome) -> None:
    return None


class Generation:
    """Goes on behind the prompt and the tokens that `choice` has; `restored` are the leading pages of these.

    Its maker sets the sequence's `on_computed` and `is_paused`, and takes the sequence out of the batch at last.
    """

    def __init__(
        self,
        runtime: Runtime,
        handoff: Handoff,
        chain: Chain,
        choice: Choice,
        restored: Restored,
        grammar: Grammar | None = None,
    ) -> None:
        self._grammar = grammar
        self.choice = choice
        self.last_token_s = time.monotonic()
        self.saver = Saver(runtime.blocks, runtime.pool, chain.names, restored.used_at)
        self._first_row = chain.first_row
        self._handoff = handoff
        self._pool = runtime.pool
        self._sampler = self._fresh_sampler()
        for token in choice.token_ids:
            self._sampler.note(token)
        self.sequence = Sequence(
            token_ids=handoff.prompt_token_ids + choice.token_ids,
            pages=list(restored.pages),
            num_computed=restored.tokens,
            on_computed=_ignore,
            samplers=[self._sampler],
            index=len(choice.token_ids),
        )
        if runtime.settings.scheduler.speculate == "lookup":
            self._guess()
        mode = runtime.settings.kv.store_generated
        # Under an arithmetic of its own decode goes on from its own blocks alone.
        self._is_stored = mode == "always" or chain.first_row > 0 or (mode == "conversation" and handoff.conversation)
        self.sequence.on_block_full = self._on_block_full

    def recheck(self, num_published: int, *, at_least_one: bool) -> None:
        """Compares those of the last block of published tokens whose rows are computed here anyway.

        With `at_least_one`, what was restored is given up as far as that takes, and as it can be computed here.
        """
        if num_published == 0:
            return
        if at_least_one and self.sequence.num_missing < 2:
            self._forget_last_row()
        first = max(0, num_published - self._pool.block_tokens)
        known = self.choice.token_ids[:num_published]
        self.sequence.recheck = Recheck(self._fresh_sampler(), len(self._handoff.prompt_token_ids), known, first)

    def differences(self) -> list[Difference]:
        """What the comparison found, told once."""
        recheck, self.sequence.recheck = self.sequence.recheck, None
        return recheck.differences if recheck is not None else []

    def go_on(self, sampled: Sampled) -> None:
        """`sampled` is known now, and its row the next to compute."""
        self.sequence.token_ids.append(sampled.id)
        self.sequence.index += 1
        self._sampler.note(sampled.id)

    def _guess(self) -> None:
        sequence, max_tokens = self.sequence, self._handoff.sampling.max_tokens
        assert max_tokens is not None
        sequence.max_tokens = len(self._handoff.prompt_token_ids) + max_tokens
        sequence.drafter = Drafter(sequence.token_ids)

    def _on_block_full(self, block: int) -> None:
        """Whoever takes the job over starts from the store: what is there must not go meanwhile."""
        if self._is_stored:
            self.saver.save_block(self.sequence, block)
        else:
            self.saver.hold(self.sequence, len(self._handoff.prompt_token_ids))

    def _forget_last_row(self) -> None:
        """A full block is given up whole: its page may be shared, and nobody writes to it again."""
        sequence, block_tokens = self.sequence, self._pool.block_tokens
        num_rows = 1 if sequence.num_computed % block_tokens else block_tokens
        if sequence.num_computed - num_rows < self._first_row:
            return
        sequence.num_computed -= num_rows
        if num_rows == block_tokens:
            self._pool.release([sequence.pages.pop()])

    def _fresh_sampler(self) -> Sampler:
        sampling = self._handoff.sampling
        assert sampling.seed is not None
        matcher = self._grammar.matcher() if self._grammar is not None else None
        return Sampler(sampling, sampling.seed, self.choice.number, self._handoff.prompt_token_ids, matcher)
