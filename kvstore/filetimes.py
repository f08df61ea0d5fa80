"""How a block file keeps its life: access time = last use, modification time + one day = expiry.

Both are set explicitly, so mount options do not matter. A file that somebody restored, copied or edited is a day old at
most and does not expire unseen: if it is damaged, it is counted as damage.
"""

import os

from kvstore.tier import Life

_DAY_NS = 86_400 * 10**9
_AHEAD_NS = 60 * 10**9


def expires_ns(status: os.stat_result) -> int:
    """In nanoseconds of the wall clock."""
    return status.st_mtime_ns + _DAY_NS


def times_of(life: Life, before: os.stat_result | None = None) -> tuple[int, int]:
    """(access, modification) time in nanoseconds for a file; `before`: its times, if it has a life to be prolonged.

    An access time that lies well ahead was set on purpose, and stays; one near now may be the system's own doing.
    """
    used_ns, end_ns = int(life.used_at * 1e9), int(life.expires_at * 1e9)
    if before is not None:
        end_ns = max(end_ns, expires_ns(before))
        if before.st_atime_ns > used_ns + _AHEAD_NS:
            used_ns = before.st_atime_ns
    return used_ns, end_ns - _DAY_NS
