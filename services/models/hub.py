"""Models of the Hugging Face hub, in the hub's own local cache."""

import re
from collections.abc import Callable
from pathlib import Path

from schemas.errors import SetupError
from services.models import hf_folder

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_SMALL = ["*.json", "*.jinja"]
_PATTERNS = [*_SMALL, "*.safetensors"]


def is_id(spec: str) -> bool:
    """`organisation/name`, with `@revision` if one is wanted."""
    return _ID.fullmatch(spec) is not None


def snapshot(spec: str, progress: Callable[[str], None], check: Callable[[Path], object]) -> Path:
    """The model's folder. One that is there already is used as it is, without asking the hub for a newer one.

    `check(folder)` raises for a model that is not wanted; the weights are downloaded only then. Raises `SetupError`
    that says what to do when the model is not there and cannot be downloaded.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    repository, _, revision = spec.partition("@")
    try:
        found = _local(repository, revision or None)
        if found is not None:
            return found
        check(Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=_SMALL)))
        progress(f"downloading {spec} from the Hugging Face hub")
        return Path(huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=_PATTERNS))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SetupError(
            f"cannot get {spec} from the Hugging Face hub: {reason.rstrip('.')}. "
            f"Without a network, run `hf download {repository}` elsewhere and give the folder's path; "
            "a gated model needs HF_TOKEN."
        ) from error


def _local(repository: str, revision: str | None) -> Path | None:
    """The cached snapshot, if it is complete."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(repository, revision=revision, local_files_only=True))
        hf_folder.config_of(folder)
        hf_folder.weight_names(folder)
    except (LocalEntryNotFoundError, SetupError):
        return None
    return folder
