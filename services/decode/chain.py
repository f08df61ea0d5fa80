"""The blocks of one choice: what they are called, and which of them decode finds in the store.

Under one arithmetic they are one chain, whoever computed them. Where decode has an arithmetic of its own, the prompt's
blocks are prefill's, and those with tokens that decode made are the job's own: they stand on a prompt that decode has
not computed, so their names carry the job's, and nobody else finds them.
"""

from typing import Protocol

from kvstore.keys import BlockRef
from schemas.handoff import Handoff
from services.engine.blocks import FetchBudget, Lookup, Restored
from services.worker.runtime import Runtime


class Chain(Protocol):
    @property
    def first_row(self) -> int:
        """The first that decode may compute: what lies before it comes from the store, or not at all."""

    def names(self, token_ids: list[int]) -> list[BlockRef]: ...

    async def restore(self, token_ids: list[int], budget: FetchBudget, lookup: Lookup) -> Restored:
        """Pages for a beginning of `token_ids`. `lookup` is of the prompt's blocks."""


def chain_of(runtime: Runtime, handoff: Handoff) -> Chain:
    return OwnPrompt(runtime, handoff) if runtime.arithmetics.is_mixed else OneChain(runtime, handoff)


class OneChain:
    first_row = 0

    def __init__(self, runtime: Runtime, handoff: Handoff) -> None:
        self._blocks = runtime.blocks
        self._handoff = handoff

    def names(self, token_ids: list[int]) -> list[BlockRef]:
        return self._blocks.refs(self._handoff.tenant, self._handoff.salt, token_ids)

    async def restore(self, token_ids: list[int], budget: FetchBudget, lookup: Lookup) -> Restored:
        return await self._blocks.restore(self.names(token_ids), budget, lookup)


class OwnPrompt:
    """Of a build with two arithmetics."""

    def __init__(self, runtime: Runtime, handoff: Handoff) -> None:
        self._pool = runtime.pool
        self._prompt_blocks = runtime.prompt_blocks
        self._blocks = runtime.blocks
        self._handoff = handoff
        self._num_shared = len(handoff.prompt_token_ids) // runtime.pool.block_tokens  # blocks of the prompt alone

    @property
    def first_row(self) -> int:
        return len(self._handoff.prompt_token_ids)

    def names(self, token_ids: list[int]) -> list[BlockRef]:
        return self._prompt_names()[: self._num_shared] + self._own_names(token_ids)

    async def restore(self, token_ids: list[int], budget: FetchBudget, lookup: Lookup) -> Restored:
        """First what decode made, for then the rest of the prompt's last block lies in that."""
        own = Restored([], 0, 0)
        if len(token_ids) < self.first_row:
            return own  # the prompt's last row gives the first token, which is prefill's to make
        if len(token_ids) > self.first_row:
            own = await self._blocks.restore(self._own_names(token_ids), budget)
        try:
            wanted = self._prompt_names()[: self._num_shared if own.pages else None]
            prompt = await self._prompt_blocks.restore(wanted, budget, lookup)
        except BaseException:
            self._pool.release(own.pages)
            raise
        if prompt.tokens < sum(ref.num_tokens for ref in wanted):
            self._pool.release(own.pages)
            return prompt
        used_at = min((part.used_at for part in (prompt, own) if part.pages), default=0.0)
        return Restored(prompt.pages + own.pages, prompt.tokens + own.tokens, 0, used_at)

    def _prompt_names(self) -> list[BlockRef]:
        handoff = self._handoff
        return self._prompt_blocks.refs(handoff.tenant, handoff.salt, handoff.prompt_token_ids)

    def _own_names(self, token_ids: list[int]) -> list[BlockRef]:
        handoff = self._handoff
        own_salt = f"{handoff.salt}\n{handoff.origin} {handoff.job}"
        return self._blocks.refs(handoff.tenant, own_salt, token_ids)[self._num_shared :]
