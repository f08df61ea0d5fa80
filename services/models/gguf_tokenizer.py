"""A GGUF's tokenizer, rebuilt once by `transformers` (3 to 6 s), so that ids are the same as there."""

import subprocess
import sys
import tempfile
from pathlib import Path

from schemas.errors import SetupError
from services.models.files import TOKENIZER_FILE
from services.models.gguf_file import GgufFile
from services.models.tokenizer_files import copy_tokenizer
from services.text.tokenizer import Tokenizer

_TIMEOUT_S = 600.0
_CONTROL = 3  # in tokenizer.ggml.token_type

# A process of its own: transformers and torch do not stay in a worker's memory, nor their warnings in its log, and
# whatever a strange file does to them ends as an exit status.
#
# Of the config only the model type matters to a tokenizer. To learn it, transformers walks the vocabulary with the
# `gguf` package, which takes longer (4 s) than all the rest.
_REBUILD = """
import contextlib
import sys
from transformers import AutoTokenizer
folder, file, model_type, to = sys.argv[1:]
with contextlib.suppress(ImportError):
    from transformers import modeling_gguf_pytorch_utils
    modeling_gguf_pytorch_utils.load_gguf_checkpoint = lambda *_, **__: {"config": {"model_type": model_type}}
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(to)
"""


def convert_tokenizer(gguf: GgufFile, eos_ids: tuple[int, ...], to: Path) -> bytes:
    """Writes the tokenizer files into `to`; returns the tokenizer's hash. Raises `SetupError`."""
    # Absolute, because the process below runs in there: a data folder is often given relative to ours.
    with tempfile.TemporaryDirectory(prefix="tokenizer-", dir=to.absolute()) as scratch:
        path = gguf.path.absolute()
        # -P and the folder: packages of ours in the current folder must not shadow those of transformers.
        kind = str(gguf.metadata["general.architecture"])
        command = [sys.executable, "-P", "-c", _REBUILD, str(path.parent), path.name, kind, scratch]
        try:
            done = subprocess.run(
                command,
                cwd=scratch,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SetupError(f"{gguf.path}: rebuilding its tokenizer took over {_TIMEOUT_S:.0f} s") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise SetupError(f"{gguf.path}: transformers cannot rebuild its tokenizer: {reason}")
        digest = copy_tokenizer(Path(scratch), to)
    _check_control_tokens(gguf, Tokenizer.from_file(to / TOKENIZER_FILE, eos_ids))
    return digest


def _check_control_tokens(gguf: GgufFile, tokenizer: Tokenizer) -> None:
    """A control token that falls to pieces makes a model talk nonsense (CASES 15)."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens", [])
    kinds = gguf.metadata.get("tokenizer.ggml.token_type", [])
    wanted = {id_ for id_, kind in enumerate(kinds) if kind == _CONTROL} | set(tokenizer.eos_ids)
    for id_ in sorted(wanted):
        if id_ >= len(tokens) or tokenizer.encode(tokens[id_], special=True) != [id_]:
            raise SetupError(f"{gguf.path}: its control token {id_} does not survive the conversion: take another file")
