"""A native int8 model of random weights."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from gguf import GGMLQuantizationType as Type

from kernels.int8_arithmetic import Int8Arithmetic
from services.engine.model import Model
from services.engine.native_model import NativeModel
from tests.model.test_families import SIZES
from tests.model.tiny import tiny_model
from tests.model.tiny_gguf_model import save_gguf

VOCAB_SIZE = 256


@cache
def tiny_native(quantisation: str = "none", lent: tuple[int, ...] = ()) -> Model:
    """2 layers, 2 KV heads of 16, with one thread of its own; `quantisation` of K and V."""
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="kvrelay-tiny-") as folder:
        source = tiny_model(**SIZES, vocab_size=VOCAB_SIZE)
        files = save_gguf(Path(folder) / "tiny.gguf", source, Type.Q4_1)
        return NativeModel(files, Int8Arithmetic(quantisation), lent)
