import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvstore.codec import PLAIN
from kvstore.nvme import NvmeTier
from kvstore.store import KVStore
from tests.kvstore.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, TTL_S, chain, payload_of

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_c_program_reads_a_plain_blob_through_mmap(tmp_path: Path) -> None:
    assert COMPILER is not None
    program = tmp_path / "mapped_blob"
    source = Path(__file__).with_name("mapped_blob.c")
    subprocess.run([COMPILER, "-Wall", "-Werror", "-O1", "-o", str(program), str(source)], check=True)
    tier = NvmeTier(tmp_path / "kv", 10**9)
    ref = chain(2)[1]
    assert KVStore([tier], IDENTITY, GEOMETRY, PLAIN).save(ref, payload_of(ref), TTL_S)
    shape = (GEOMETRY.layers, 2, GEOMETRY.heads, BLOCK_TOKENS, GEOMETRY.head_dim)
    words = np.frombuffer(payload_of(ref), "<u2").reshape(shape)
    values = (words.astype("<u4") << 16).view("<f4")
    for index in ((0, 0, 0, 0, 0), (1, 0, 2, 7, 3), tuple(size - 1 for size in shape)):
        done = subprocess.run(
            [program, tier.path(ref.name), *map(str, index)], capture_output=True, encoding="utf-8", check=True
        )
        *found, value = done.stdout.split()
        assert [int(number) for number in found] == [2, 3, 16, BLOCK_TOKENS, BLOCK_TOKENS]
        assert float(value) == pytest.approx(float(values[index]), rel=1e-8)
    tier.close()
