"""Who computes a model of an arithmetic on this machine, and who does when that one computes something else."""

import logging
from collections.abc import Callable, Sequence

from kernels.arithmetic import Arithmetic
from schemas.errors import SetupError
from services.engine.check import Canary
from services.engine.model import Files, Model
from services.engine.native_model import NativeModel
from services.engine.reference_model import ReferenceModel

log = logging.getLogger(__name__)


def load_model(files: Files, arithmetic: Arithmetic, lent: Sequence[int] = ()) -> Model:
    """The fastest. `lent`: cores that it may be lent for a pass.

    Raises `SetupError` for a model that is unsupported or incomplete.
    """
    if arithmetic.takes_blocks:
        return NativeModel(files, arithmetic, lent)
    return ReferenceModel(files, arithmetic)


def load_checked(
    files: Files,
    arithmetic: Arithmetic,
    check: Callable[[Model], Canary],
    load: Callable[[Files, Arithmetic], Model] = load_model,
) -> tuple[Model, Canary, str]:
    """A model that passed `check`, its canary, and what an operator should know of it, if anything.

    When the fast one fails, the plain implementation of the same arithmetic computes instead, if that passes: same
    bits, many times slower. Raises `SetupError` when it does not.
    """
    model = load(files, arithmetic)
    try:
        return model, check(model), ""
    except SetupError as error:
        if isinstance(model, ReferenceModel):
            raise
        log.error("ALARM: %s", error.message)
    del model
    slow = ReferenceModel(files, arithmetic)
    canary = check(slow)
    trouble = f"{arithmetic.name} is computed by its reference implementation, slowly: the native step failed its check"
    log.error("ALARM: %s", trouble)
    return slow, canary, trouble
