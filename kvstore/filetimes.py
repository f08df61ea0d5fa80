"""How a block file keeps its life: access time = last use, modification time + one day = expiry.

An odd number of microseconds in the modification time says that the block was reused (`kvstore.eviction`). Both times
are set explicitly, so mount options do not matter. A file that somebody restored, copied or edited is a day old at most
and does not expire unseen: if it is damaged, it is counted as damage.
"""

import os

from kvstore.tier import Life

_DAY_NS = 86_400 * 10**9
_MARK_NS = 1000
AHEAD_NS = 60 * 10**9  # a time of use that lies further ahead was set on purpose: a clock is not that wrong


def expires_ns(status: os.stat_result) -> int:
    """In nanoseconds of the wall clock."""
    return status.st_mtime_ns + _DAY_NS


def is_reused(status: os.stat_result) -> bool:
    return status.st_mtime_ns // _MARK_NS % 2 == 1


def times_of(life: Life, before: os.stat_result | None = None) -> tuple[int, int]:
    """(access, modification) time in nanoseconds. A file that was there `before` expires no earlier, one that was
    reused stays so, and one that was dated ahead on purpose too."""
    used, expires = int(life.used_at * 1e9), int(life.expires_at * 1e9)
    reused = life.reused
    if before is not None:
        expires = max(expires, expires_ns(before))
        reused = reused or is_reused(before)
        if before.st_atime_ns > used + AHEAD_NS:
            used = before.st_atime_ns
    modified = (expires - _DAY_NS) // (2 * _MARK_NS) * 2 * _MARK_NS
    return used, modified + _MARK_NS * reused
