"""Weights of one or more safetensors files, read as one mapping."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.quantised_weight import QuantisedWeight
from schemas.errors import SetupError


class SafetensorsSource:
    def __init__(self, files: Sequence[Path]) -> None:
        try:
            self._open: list[Any] = [safe_open(path, framework="pt") for path in files]
        except (OSError, SafetensorError) as error:
            raise SetupError(f"cannot read the weights {', '.join(map(str, files))}: {error}") from error
        self._file_of = {name: file for file in self._open for name in file.keys()}  # noqa: SIM118

    def __enter__(self) -> "SafetensorsSource":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._open:
            file.__exit__(kind, error, at)

    def read(self, name: str, *shape: int) -> Tensor:
        if name not in self._file_of:
            raise SetupError(f"the weights have no tensor {name}: the file is incomplete or of another architecture")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if tensor.shape != shape:
            raise SetupError(f"tensor {name} is {list(tensor.shape)}, the config says {list(shape)}")
        return tensor

    def read_quantised(self, name: str, *shape: int) -> QuantisedWeight:
        raise SetupError(f"tensor {name} is not quantised: safetensors weights are computed in bfloat16 or float32")

    def formats(self) -> dict[str, str]:
        return {name: file.get_slice(name).get_dtype() for name, file in self._file_of.items()}
