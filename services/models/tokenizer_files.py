"""The tokenizer part of a prepared model: tokenizer.json, and tokenizer_config.json with the chat template in it."""

import json
from pathlib import Path
from typing import Any

from schemas.errors import SetupError
from services.models.digest import canonical_json, digest_of
from services.models.files import FINGERPRINT_BYTES, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
SOURCE_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE, SPECIAL_TOKENS_FILE)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def copy_tokenizer(source: Path, to: Path) -> bytes:
    """Copies a Hugging Face folder's tokenizer in our normal form; returns its hash.

    Raises `SetupError` if there is no tokenizer.json, or a file is broken.
    """
    if not (source / TOKENIZER_FILE).is_file():
        raise SetupError(
            f"{source} has no {TOKENIZER_FILE}: make one with "
            f"transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    tokenizer = _read(source / TOKENIZER_FILE)
    settings = _settings(source)
    (to / TOKENIZER_FILE).write_bytes(tokenizer)
    (to / TOKENIZER_CONFIG_FILE).write_text(json.dumps(settings, ensure_ascii=True, indent=1), encoding="utf-8")
    return digest_of([tokenizer, canonical_json(settings)], "kvrelay-tok", FINGERPRINT_BYTES)


def _settings(source: Path) -> dict[str, Any]:
    """The special tokens and the chat template: nothing else of tokenizer_config.json changes a prompt."""
    config = _read_object(source / TOKENIZER_CONFIG_FILE)
    tokens = _read_object(source / SPECIAL_TOKENS_FILE) | config
    settings = {name: _content(tokens[name]) for name in _SPECIAL_TOKENS if tokens.get(name)}
    template = _template(source, config)
    return settings if template is None else settings | {"chat_template": template}


def _template(source: Path, config: dict[str, Any]) -> str | None:
    """The file beside wins, as in `transformers`; of several named templates, the default."""
    if (source / TEMPLATE_FILE).is_file():
        return _decoded(source / TEMPLATE_FILE)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise SetupError(f"{source / TOKENIZER_CONFIG_FILE}: chat_template must be a string or a list of named ones")
    return template


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _read_object(path: Path) -> dict[str, Any]:
    """{} if the file is not there."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_decoded(path))
    except ValueError as error:
        raise SetupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SetupError(f"{path} holds no JSON object")
    return value


def _decoded(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} is not UTF-8: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error}") from error
