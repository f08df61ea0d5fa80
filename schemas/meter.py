"""What a worker has counted since it started; rides in its beat, so that one look at the beats tells of a pipeline.

Latencies are counted in buckets of an eighth of an octave: those of several workers can be added, and a percentile of
them is within 5 % of the true one.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

_FIRST_S = 1e-6
_PER_OCTAVE = 8

Buckets = dict[int, int]
"""Bucket -> number of values in it; bucket k ends at 2 ** (k / 8) microseconds."""


class Meter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`asked_tokens`: prompt tokens that were looked up in the store, `hit_tokens` found there; the others computed."""

    asked_tokens: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft: Buckets = {}
    itl: Buckets = {}

    def plus(self, other: "Meter") -> "Meter":
        return self._with(other, 1)

    def since(self, earlier: "Meter") -> "Meter":
        """What was counted between two meters of one process."""
        return self._with(earlier, -1)

    def _with(self, other: "Meter", sign: int) -> "Meter":
        return Meter(
            asked_tokens=self.asked_tokens + sign * other.asked_tokens,
            hit_tokens=self.hit_tokens + sign * other.hit_tokens,
            prompt_tokens=self.prompt_tokens + sign * other.prompt_tokens,
            generated_tokens=self.generated_tokens + sign * other.generated_tokens,
            ttft=_sum(self.ttft, other.ttft, sign),
            itl=_sum(self.itl, other.itl, sign),
        )


def bucket_of(value_s: float) -> int:
    return max(0, math.ceil(_PER_OCTAVE * math.log2(max(value_s, _FIRST_S) / _FIRST_S)))


def percentiles_s(buckets: Mapping[int, int], shares: Iterable[float]) -> list[float | None]:
    """For each share the value that so many do not exceed, None where nothing was counted."""
    num = sum(buckets.values())
    return [_value_at(buckets, max(1, math.ceil(share * num))) if num else None for share in shares]


def _value_at(buckets: Mapping[int, int], rank: int) -> float:
    bucket = 0
    for bucket in sorted(buckets):
        rank -= buckets[bucket]
        if rank <= 0:
            break
    return _FIRST_S * math.exp2((bucket - 0.5) / _PER_OCTAVE)


def _sum(ours: Mapping[int, int], theirs: Mapping[int, int], sign: int) -> Buckets:
    total = dict(ours)
    for bucket, num in theirs.items():
        total[bucket] = total.get(bucket, 0) + sign * num
    return {bucket: num for bucket, num in total.items() if num}
