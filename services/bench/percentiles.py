"""What the slow ones of many measurements took."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed. `values`: one or more, in any order."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread_ms(values_s: Sequence[float]) -> dict[str, float]:
    """`p50_ms`, `p99_ms`, `p999_ms`, `max_ms`."""
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
    return {name: round(1000 * percentile(values_s, share), 3) for name, share in shares.items()}
