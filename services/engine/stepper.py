"""What a model gives that samples in the call that computes: ids instead of logits."""

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.sampling import Draw, Row
from services.engine.model import Span


class Wanted(NamedTuple):
    """Of row `row` of a pass: the token that `draw` chooses, or the logits if that is None."""

    row: int
    draw: Draw | None


Found = int | Row | None
"""An id, None where the logits are not finite, or the logits `[V] float32`."""


class Passed(NamedTuple):
    """What a pass gave. `found`: for each `Wanted`. `finite`: `[R] bool`, the rows whose K and V are numbers."""

    found: list[Found]
    finite: npt.NDArray[np.bool_]


class Gate(Protocol):
    def open(self) -> None:
        """What was written before is seen by who waited. Called once, by any thread."""


@runtime_checkable
class Stepper(Protocol):
    """A model that samples in the same call, so that logits need not leave it."""

    def new_gate(self) -> Gate:
        """For one step."""

    def step(
        self, token_ids: Seq[int], spans: Seq[Span], pool: Tensor, wanted: Seq[Wanted], gate: Gate | None
    ) -> Passed:
        """Computes the rows as `Model.forward` does. `wanted`: rows ascending, one may be asked for several times.

        With a `gate`, what the draws allow need not be known before that is open.
        """
