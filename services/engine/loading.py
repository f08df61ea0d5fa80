"""Who computes a model of an arithmetic on this machine."""

from collections.abc import Sequence

from kernels.arithmetic import Arithmetic
from services.engine.model import Files, Model
from services.engine.native_model import NativeModel
from services.engine.reference_model import ReferenceModel


def load_model(files: Files, arithmetic: Arithmetic, lent: Sequence[int] = ()) -> Model:
    """The fastest. `lent`: cores that it may be lent for a pass.

    Raises `SetupError` for a model that is unsupported or incomplete.
    """
    if arithmetic.takes_blocks:
        return NativeModel(files, arithmetic, lent)
    return ReferenceModel(files, arithmetic)
