"""How a model that kvrelay cannot serve is refused: with the setting that makes it so."""

from typing import Any

from schemas.errors import SetupError


def unsupported(where: str, setting: str, value: Any, meaning: str) -> SetupError:
    return SetupError(f"{where}: {setting}={value!r:.80} ({meaning}) is not supported: choose another model")
