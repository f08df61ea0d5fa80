"""What lies under the processes does what the driver says, and only there."""

import subprocess
import sys
from pathlib import Path

from tests.chaos.control import INTERPOSED

PROGRAM = """
import errno, os, sys, time
import sitecustomize
from faultpage import FaultPage, Faults
page, folder, report = FaultPage(sys.argv[1]), sys.argv[2], sys.argv[3]
clean = time.time()
sitecustomize.install(page, "decode", folder, report)
inside, outside = f"{folder}/block", f"{folder}-not"

def write(path, parts):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        return os.writev(fd, parts)
    finally:
        os.close(fd)

page.write(Faults(clock_pid=-1, clock_role=-1))
assert abs(time.time() - clean) < 5
page.write(Faults(clock_pid=os.getpid(), clock_role=-1, clock_offset_s=86400.0))
assert 86_300 < time.time() - clean < 86_500
page.write(Faults(clock_pid=-1, clock_role=2, clock_offset_s=-86400.0))
assert -86_500 < time.time() - clean < -86_300 and time.time_ns() / 1e9 - time.time() < 5

page.write(Faults(full_until_s=time.monotonic() + 100))
assert write(inside, [b"abcdef", b"gh"]) == 3, "some of it still fits"
try:
    write(inside, [b"def", b"gh"])
except OSError as error:
    assert error.errno == errno.ENOSPC
else:
    raise AssertionError("the disk is not full")

page.write(Faults(frozen_until_s=time.monotonic() + 2.0))
os.open(outside, os.O_WRONLY | os.O_CREAT)
assert page.read().frozen_until_s > time.monotonic(), "what is elsewhere goes on"
os.stat(inside)
assert page.read().frozen_until_s <= time.monotonic()
assert write(inside, [b"de", b"f"]) == 3
"""


def test_clock_disk_and_store(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    arguments = [tmp_path / "page", tmp_path / "kv", tmp_path / "report"]
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    subprocess.run(command, env={"PYTHONPATH": str(INTERPOSED)}, check=True)
