import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvstore.codec import PLAIN
from kvstore.nvme import NvmeTier
from kvstore.store import KVStore
from schemas.blob import Quantisation
from tests.kvstore.blocks import BLOCK_TOKENS, TTL_S, chain, empty, payload_of, quantised

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
BF16_STEP = 2.0**-8  # what a product of value and scale loses when the page is bfloat16


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    program = tmp_path_factory.mktemp("c") / "mapped_blob"
    source = Path(__file__).with_name("mapped_blob.c")
    subprocess.run([COMPILER, "-Wall", "-Wextra", "-Werror", "-O1", "-o", str(program), str(source)], check=True)
    return program


@pytest.mark.parametrize("quantisation", Quantisation, ids=lambda quantisation: quantisation.name)
def test_a_c_program_reads_a_plain_blob_through_mmap(program: Path, tmp_path: Path, quantisation: Quantisation) -> None:
    tier = NvmeTier(tmp_path / "kv", 10**9)
    identity, geometry = quantised(quantisation)
    store, ref = KVStore([tier], identity, geometry, PLAIN), chain(2)[1]
    page = empty(ref)
    assert store.save(ref, payload_of(ref), TTL_S) and store.load(ref, page)
    shape = (geometry.layers, 2, geometry.heads, BLOCK_TOKENS, geometry.head_dim)
    values = (np.frombuffer(page, "<u2").reshape(shape).astype("<u4") << 16).view("<f4")
    precision = 1e-8 if quantisation is Quantisation.NONE else BF16_STEP
    for index in ((0, 0, 0, 0, 0), (1, 0, 2, 7, 3), (0, 1, 1, 5, 8), tuple(size - 1 for size in shape)):
        done = subprocess.run(
            [program, tier.path(ref.name), *map(str, index)], capture_output=True, encoding="utf-8", check=True
        )
        *found, value = done.stdout.split()
        assert [int(number) for number in found] == [2, 3, 16, BLOCK_TOKENS, BLOCK_TOKENS]
        assert float(value) == pytest.approx(float(values[index]), rel=precision)
    tier.close()
