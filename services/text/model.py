"""A model as text sees it: tokenizer, chat template, context and end tokens."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import SetupError
from services.models.files import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, ModelFiles
from services.text.grammars import Grammars
from services.text.template import ChatTemplate
from services.text.tokenizer import Tokenizer


class TextModel(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """`template` is None for a model without one: it takes prompts, not messages. `vocab_size` counts the rows of
    the model's embedding, which may be more than the tokenizer has tokens."""

    slug: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vocab_size, self.eos_ids)


def load_text(files: ModelFiles) -> TextModel:
    """Under a second. Raises `SetupError` for files that are missing or broken."""
    settings = _tokenizer_config(files.path / TOKENIZER_CONFIG_FILE)
    source = settings.get("chat_template")
    return TextModel(
        slug=files.slug,
        tokenizer=Tokenizer.from_file(files.path / TOKENIZER_FILE, files.eos_ids),
        template=ChatTemplate(source, _special_tokens(settings)) if isinstance(source, str) else None,
        context_tokens=files.context_tokens,
        vocab_size=files.vocab_size,
        eos_ids=files.eos_ids,
    )


def _tokenizer_config(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"cannot read {path}: {error}") from error
    if not isinstance(settings, dict):
        raise SetupError(f"{path} holds no JSON object")
    return settings


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, which are a string or an object with `content`."""
    found = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
