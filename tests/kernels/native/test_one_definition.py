"""No function that was compiled for one instruction set can stand in for another's, whatever the optimiser leaves."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.native.build import FLAGS, SOURCES, find_compiler, flags_of, is_for_this_machine

ONE_EACH = [
    source for source in sorted(SOURCES.glob("*.cpp"))
    if source.stem.startswith(("kernels_", "sampler_")) and is_for_this_machine(source)
]  # fmt: skip


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm, of the compiler's own tools, lists what a file defines")
@pytest.mark.parametrize("source", ONE_EACH, ids=lambda source: source.stem)
def test_files_of_instruction_sets_share_no_function(source: Path, tmp_path: Path) -> None:
    """Of a function that several files define weakly, the linker keeps any one. With nothing optimised, every inline
    function that can become one does: none may be found but those in a namespace of the file's own."""
    compiler, built = find_compiler(), tmp_path / "one.o"
    flags = [*(flag for flag in FLAGS if flag not in ("-O3", "-g1")), "-O0", *flags_of(source, compiler)]
    subprocess.run([*compiler, *flags, "-c", str(source), "-o", str(built)], check=True, capture_output=True)
    listed = subprocess.run(["nm", "-C", str(built)], check=True, capture_output=True, encoding="utf-8").stdout
    symbols = [line[17:].partition(" ")[::2] for line in listed.splitlines() if line[17:18] != "U"]
    assert len(symbols) > 10, listed
    own = source.stem.partition("_")[2]
    assert [name for kind, name in symbols if kind in "WVu" and f"kvr::{own}::" not in name] == []
