"""How a block file keeps its life: access time = last use, modification time + one day = expiry.

Both are set explicitly, so mount options do not matter. A file that somebody restored, copied or edited is a day old at
most and does not expire unseen: if it is damaged, it is counted as damage.
"""

import os

from kvstore.tier import Life

_DAY_NS = 86_400 * 10**9


def expires_ns(status: os.stat_result) -> int:
    """In nanoseconds of the wall clock."""
    return status.st_mtime_ns + _DAY_NS


def times_of(life: Life, not_before_ns: int = 0) -> tuple[int, int]:
    """(access, modification) time in nanoseconds for a file that must not expire before `not_before_ns` either."""
    return int(life.used_at * 1e9), max(not_before_ns, int(life.expires_at * 1e9)) - _DAY_NS
