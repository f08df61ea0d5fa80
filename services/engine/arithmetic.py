"""The arithmetic a worker computes a model with."""

import logging

from kernels import dispatch
from kernels.arithmetic import Arithmetic
from kernels.quantised_weight import BLOCK_BYTES
from schemas.errors import SetupError
from services.engine.model import Files
from services.engine.model_config import ModelConfig
from services.engine.weight_source import open_weights
from services.models.weight_layout import layout_of

log = logging.getLogger(__name__)


def dtype_of(files: Files, asked: str) -> str:
    """The setting compute.dtype without "auto". Raises `SetupError` for weights that cannot be read."""
    if asked != "auto":
        return asked
    with open_weights(files.weights, files.config) as source:
        formats = source.formats()
    products = layout_of(ModelConfig.from_hf(files.config)).products()
    kinds = {formats.get(part.name) for product in products for part in product.weight}
    return "int8" if kinds <= set(BLOCK_BYTES) else "bfloat16"


def choose_arithmetic(config: ModelConfig, dtype: str, quantisation: str = "none") -> Arithmetic:
    """`dtype` and `quantisation` are the settings compute.dtype and kv.quantisation.

    Set the threads first: exactness is tried out with as many as the worker uses. Raises `SetupError`."""
    try:
        arithmetic = dispatch.choose(dtype, config.shapes, quantisation=quantisation)
    except (dispatch.NoExactArithmetic, ValueError) as error:
        raise SetupError(str(error)) from error
    log.info("arithmetic %s, id %s", arithmetic.name, arithmetic.id.hex())
    return arithmetic
