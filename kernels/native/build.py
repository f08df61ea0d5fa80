"""Compiles `src/*.cpp` into one shared library: by setuptools at installation, by hand when a source changed.

    python -m kernels.native.build                        in place: only what changed
    python -m kernels.native.build --sanitize thread      beside it, under build/, for `kernels.native.sanitize`

The flags are part of the arithmetic: no contraction to fused operations but those that are written, nothing that is
fast but inexact, and no instruction beyond the machine's least but in files that are named after their set, which run
only where the processor has it. Knows nothing of what the sources do.
"""

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from kernels.native import LIBRARY

HERE = Path(__file__).parent
SOURCES = HERE / "src"

FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-pthread", "-g1"]
FLAGS += [
    "-Wall",
    "-Wextra",
    "-Wno-unknown-warning-option",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]  # of gcc, about its own intrinsics
X86_FLAGS = {
    "_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512": [*(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")), "-mf16c", "-mfma"],
}
"""By the end of a source's name: left out where the processor is another."""

SANITIZERS = ("address,undefined", "thread")


class CannotBuild(RuntimeError):
    """The message says what to do."""


class BuildKernels(build_ext):  # type: ignore[misc]
    """The project's one extension is a plain library: no Python header is needed, and one build fits all versions."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        build(Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp))


def build(library: Path, objects: Path, extra: Sequence[str] = ()) -> None:
    """Compiles into `objects` what is not there as it should be, and links `library`. Raises `CannotBuild`."""
    compiler = find_compiler()
    objects.mkdir(parents=True, exist_ok=True)
    steps = [
        (source, objects / f"{source.stem}.o", [*compiler, *FLAGS, *extra, *flags_of(source, compiler)])
        for source in sorted(SOURCES.glob("*.cpp"))
        if is_for_this_machine(source)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda step: _compile(*step), steps))
    link = [*compiler, *extra, "-shared", "-pthread", *(str(built) for _, built, _ in steps)]
    linked_by = objects / "link.command"
    if any(compiled) or not library.exists() or not _says(linked_by, link):
        library.parent.mkdir(parents=True, exist_ok=True)
        beside = library.with_suffix(f".{os.getpid()}.part")  # a process may have the old one mapped
        _run([*link, "-o", str(beside)])
        os.replace(beside, library)
        linked_by.write_text(shlex.join(link), encoding="utf-8")


def find_compiler() -> list[str]:
    """$CXX, else the system's, else the one that PyPI's `ziglang` brings. Raises `CannotBuild`."""
    if "CXX" in os.environ:
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        # Named, a target means the least processor of its kind; zig's default is this very one.
        target = f"{platform.machine()}-linux-gnu.2.28" if sys.platform == "linux" else f"{platform.machine()}-native"
        return [sys.executable, "-m", "ziglang", "c++", "-target", target, "-fno-sanitize=all"]
    raise CannotBuild(
        "kvrelay's kernels are C++ and no compiler is found: install g++ or clang++, or `pip install ziglang`, "
        "or name one in $CXX"
    )


def sanitized(sanitizers: str) -> Path:
    """The library built with `sanitizers`, one of `SANITIZERS`. Raises `CannotBuild`."""
    folder = HERE.parent.parent / "build" / f"sanitized-{sanitizers.replace(',', '-')}"
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g"]
    build(folder / LIBRARY, folder / "objects", flags)
    return folder / LIBRARY


def is_for_this_machine(source: Path) -> bool:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return is_x86 or not source.stem.endswith(tuple(X86_FLAGS))


def flags_of(source: Path, compiler: list[str]) -> list[str]:
    flags = next((flags for end, flags in X86_FLAGS.items() if source.stem.endswith(end)), [])
    # To zig's clang, vectors of 512 bits are a feature of their own, which gcc 12 has not heard of.
    return [*flags, "-mevex512"] if "ziglang" in compiler and "-mavx512f" in flags else flags


def _compile(source: Path, built: Path, command: list[str]) -> bool:
    """False: it was as it should be."""
    made_by = built.with_suffix(".command")
    if built.exists() and _says(made_by, command):
        made_at = built.stat().st_mtime_ns
        if all(Path(read).exists() and Path(read).stat().st_mtime_ns < made_at for read in _read_for(built)):
            return False
    made_by.unlink(missing_ok=True)
    _run([*command, "-MMD", "-MF", str(built.with_suffix(".d")), "-c", str(source), "-o", str(built)])
    made_by.write_text(shlex.join(command), encoding="utf-8")
    return True


def _says(file: Path, command: list[str]) -> bool:
    return file.exists() and file.read_text(encoding="utf-8") == shlex.join(command)


def _read_for(built: Path) -> list[str]:
    """The files that the compiler read, as it noted them for make."""
    noted = built.with_suffix(".d").read_text(encoding="utf-8").replace("\\\n", " ")
    return shlex.split(noted.partition(": ")[2])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    except OSError as error:
        raise CannotBuild(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise CannotBuild(f"{shlex.join(command)}\n{done.stderr or done.stdout}")
    if done.stderr:
        sys.stderr.write(done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.native.build", description="Builds the C++ kernels.")
    parser.add_argument("--sanitize", choices=SANITIZERS, help="a build of its own, with these sanitizers")
    chosen = parser.parse_args().sanitize
    try:
        if chosen:
            sanitized(chosen)
        else:
            build(HERE / LIBRARY, HERE.parent.parent / "build" / "objects")
    except CannotBuild as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
