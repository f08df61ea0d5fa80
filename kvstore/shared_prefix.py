"""How much of a prompt is public: the longest run of whole blocks that it has in common with a shared pin."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.keys import TokenIds


class SharedPrefixes(NamedTuple):
    """The tokens of all shared pins of a model."""

    prefixes: tuple[tuple[int, ...], ...] = ()

    def num_blocks(self, token_ids: TokenIds, block_tokens: int) -> int:
        """How many leading full blocks of `token_ids` are everybody's.

        Cutting `token_ids` cuts the answer and changes nothing before the cut, so the chain of a prompt is the same
        whether or not it goes on.
        """
        return max((_common_blocks(prefix, token_ids, block_tokens) for prefix in self.prefixes), default=0)


def _common_blocks(prefix: Sequence[int], token_ids: TokenIds, block_tokens: int) -> int:
    whole = min(len(prefix), len(token_ids)) // block_tokens
    for block in range(whole):
        ours = token_ids[block * block_tokens : (block + 1) * block_tokens]
        if any(a != b for a, b in zip(ours, prefix[block * block_tokens :], strict=False)):
            return block
    return whole
