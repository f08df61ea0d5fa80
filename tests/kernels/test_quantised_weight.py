"""Blocks of GGUF files mean what the `gguf` package says, bit for bit, in any order of rows."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kernels.quantised_weight import BLOCK_BYTES, BLOCK_VALUES, QuantisedWeight


def blocks_of(format: str) -> st.SearchStrategy[Any]:
    """Any bytes: scales that are subnormal, infinite or NaN too."""
    sizes = st.tuples(st.integers(1, 5), st.integers(1, 3).map(lambda blocks: blocks * BLOCK_BYTES[format]))
    return arrays.arrays(np.uint8, sizes)


@pytest.mark.parametrize("format", BLOCK_BYTES)
@given(data=st.data())
def test_dequantised_as_the_gguf_package_does(format: str, data: st.DataObject) -> None:
    raw = data.draw(blocks_of(format))
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, Type[format])
    weight = QuantisedWeight(format, torch.from_numpy(raw))
    assert (weight.outputs, weight.inputs) == wanted.shape
    ours = weight.dequantise().numpy()
    nans = np.isnan(wanted)
    assert np.array_equal(np.isnan(ours), nans)
    assert np.where(nans, 0, ours).tobytes() == np.where(nans, 0, wanted).tobytes()


@pytest.mark.parametrize("format", BLOCK_BYTES)
def test_rows_come_in_their_order(format: str) -> None:
    values = np.random.default_rng(3).standard_normal((6, 2 * BLOCK_VALUES), np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(values, Type[format]))
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    plain = QuantisedWeight(format, raw).dequantise()
    assert torch.equal(QuantisedWeight(format, raw, order).dequantise(), plain[order])
    assert not torch.equal(plain[order], plain)
