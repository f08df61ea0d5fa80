"""Becomes another program that dies when this one's parent does: `python tether.py <parent pid> <program> [...]`.

A parent that is killed with -9 cannot tell its children, so the kernel does (prctl, Linux). Elsewhere the program runs
untethered, and a killed `up` leaves its workers to be stopped by hand. Imports nothing of ours: it starts in 20 ms.
"""

import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9  # not SIGTERM: its queue and its siblings are being killed too, and every job survives that


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):  # it died before the kernel was told
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
