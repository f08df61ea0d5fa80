"""Runs Python with a library built for sanitizers: `python -m kernels.native.sanitize thread -m pytest ...`.

The sanitizers' runtime has to be there before Python is, so this becomes another process with it preloaded. They watch
our code alone: what Python and torch do not free, or guard by means that they cannot see, is none of our business.
"""

import os
import subprocess
import sys
from pathlib import Path

from kernels.native.build import SANITIZERS, CannotBuild, find_compiler, sanitized

RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=1",
    "UBSAN_OPTIONS": "halt_on_error=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:report_signal_unsafe=0",
}


def main(sanitizers: str, arguments: list[str]) -> None:
    """Does not return."""
    try:
        library, compiler = sanitized(sanitizers), find_compiler()
    except CannotBuild as error:
        sys.exit(str(error))
    runtimes = [_runtime(compiler, name) for name in RUNTIMES[sanitizers]]
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(runtimes), "KVRELAY_KERNELS": str(library)}
    os.execve(sys.executable, [sys.executable, *arguments], environment)


def _runtime(compiler: list[str], name: str) -> str:
    asked = [*compiler, f"-print-file-name={name}"]
    found = subprocess.run(asked, capture_output=True, text=True, encoding="utf-8", check=True).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"{compiler[0]} brings no {name}: take gcc")
    return os.path.realpath(found)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in SANITIZERS:
        sys.exit(f"usage: python -m kernels.native.sanitize {'|'.join(SANITIZERS)} <arguments of python>")
    main(sys.argv[1], sys.argv[2:])
