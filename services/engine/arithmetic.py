"""The arithmetic a worker computes a model with."""

import logging

from kernels import dispatch
from kernels.arithmetic import Arithmetic
from schemas.errors import SetupError
from services.engine.model_config import ModelConfig

log = logging.getLogger(__name__)


def choose_arithmetic(config: ModelConfig, dtype: str, quantisation: str = "none") -> Arithmetic:
    """`dtype` and `quantisation` are the settings compute.dtype and kv.quantisation.

    Set the threads first: exactness is tried out with as many as the worker uses. Raises `SetupError`."""
    try:
        arithmetic = dispatch.choose(dtype, config.shapes, quantisation=quantisation)
    except (dispatch.NoExactArithmetic, ValueError) as error:
        raise SetupError(str(error)) from error
    log.info("arithmetic %s, id %s", arithmetic.name, arithmetic.id.hex())
    return arithmetic
