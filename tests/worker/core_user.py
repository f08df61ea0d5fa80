"""A process with cores that it lends and borrows: `python core_user.py MAP OWN NEIGHBOURS`, told what to do on stdin.

`begin` answers with the cores that are lent to it, `revoked` whether one is wanted back, `end` ends the pass. `run N`
makes N passes as fast as it can and answers with what each had lent, and when.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from services.worker.cores import SharedCores


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def main(path: str, own: str, neighbours: str) -> None:
    cores = SharedCores(Path(path), json.loads(own), json.loads(neighbours))
    for line in sys.stdin:
        word, *arguments = line.split()
        if word == "begin":
            cores.begin()
            answer(cores._borrowed)
        elif word == "revoked":
            answer(cores.is_revoked())
        elif word == "end":
            answer(cores.end())
        else:
            answer([timed(cores) for _ in range(int(arguments[0]))])


def timed(cores: SharedCores) -> tuple[list[int], int, int]:
    cores.begin()
    began_ns, lent = time.monotonic_ns(), list(cores._borrowed)
    time.sleep(0.0005)
    ended_ns = time.monotonic_ns()
    cores.end()
    time.sleep(0.0002)
    return lent, began_ns, ended_ns


if __name__ == "__main__":
    main(*sys.argv[1:])
