"""What the kernel knows of a process: memory, descriptors, threads, time on a core."""

import contextlib
import os


def anonymous_bytes(pid: int) -> int:
    """Memory without files: pages of files that are mapped come and go."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        fields = dict(line.split(":", 1) for line in status)
    return 1024 * (int(fields["RssAnon"].split()[0]) + int(fields["VmSwap"].split()[0]))


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def cpu_s(pid: int) -> float:
    """Seconds of a core that a process has used, to the nanosecond."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"/proc/{pid}/task/{thread}/schedstat", encoding="utf-8") as s,
        ):
            total += int(s.read().split()[0])
    return total / 1e9
