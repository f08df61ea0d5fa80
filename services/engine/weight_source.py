"""Where a model's tensors come from, by their Hugging Face names, read one at a time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from kernels.quantised_weight import QuantisedWeight
from schemas.errors import SetupError
from services.engine.gguf_source import GgufSource
from services.engine.safetensors_source import SafetensorsSource
from services.models.gguf_file import is_gguf


class WeightSource(Protocol):
    """Every method raises `SetupError` for a tensor that is missing or of another shape than asked for."""

    def __enter__(self) -> "WeightSource": ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def read(self, name: str, *shape: int) -> Tensor:
        """In Hugging Face's row order, of a floating-point type: what the file has, or float32 for quantised ones."""
        ...

    def read_quantised(self, name: str, *shape: int) -> QuantisedWeight:
        """`shape` is (N, K). The blocks may be a view of the mapped file, which stays mapped as long as they live.

        Raises `SetupError` for a tensor that is not quantised.
        """
        ...

    def formats(self) -> dict[str, str]:
        """Name -> how it is stored, by the file's own name for it: "Q4_1", "F32", "BF16", ..."""
        ...


def open_weights(files: Sequence[Path], config: Mapping[str, Any]) -> WeightSource:
    """`files`: safetensors, or one GGUF; `config` as Hugging Face has it. To be closed by leaving its context.

    Raises `SetupError` for files that cannot be read.
    """
    if not files:
        raise SetupError("the model has no weights")
    if gone := [path for path in files if not path.is_file()]:
        raise SetupError(f"the weights {gone[0]} are gone since the model was prepared: give the place where it is now")
    if is_gguf(files[0]):
        return GgufSource(files[0], config)
    return SafetensorsSource(files)
