"""How every JSON message is read and written: strict types, limits first, errors that name the field."""

import json
import re
from typing import Any, TypeVar

import msgspec

from schemas.errors import InvalidRequest, KvrelayError, Undecodable, UnsupportedVersion

WIRE_VERSION = 1
MAX_DEPTH = 64

T = TypeVar("T")
_PATH = re.compile(r"at (?:`key` in )?`\$\.?([^`]*)`")
_encoder = msgspec.json.Encoder()


class _Version(msgspec.Struct):
    v: int = WIRE_VERSION


_version_decoder = msgspec.json.Decoder(_Version)


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def decode_versioned(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T:
    """Decodes `data`, refusing newer wire versions before looking at the rest.

    Raises `UnsupportedVersion`, or `InvalidRequest` with the field's path in `param`.
    """
    version = translate(_version_decoder, data).v
    if version != WIRE_VERSION:
        raise UnsupportedVersion(f"this worker speaks version {WIRE_VERSION}, the message has v={version}", param="v")
    return translate(decoder, data)


def translate(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T:
    """`decoder.decode(data)` with msgspec's errors turned into `InvalidRequest`: `Undecodable` if it is no object."""
    try:
        return decoder.decode(data)
    except KvrelayError:
        raise
    except msgspec.ValidationError as error:
        # msgspec wraps errors raised in __post_init__; ours already name their field.
        if isinstance(error.__cause__, KvrelayError):
            raise error.__cause__ from None
        found = _PATH.search(str(error))
        path = found.group(1) if found else None
        if path is None and (unknown := re.search(r"unknown field `([^`]*)`", str(error))):
            path = unknown.group(1)
        if path is None and str(error).startswith("Expected `object`"):
            raise Undecodable(str(error)) from error
        raise InvalidRequest(str(error), param=path or None) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _malformed(data, error) from error


def _malformed(data: bytes, error: Exception) -> InvalidRequest:
    """Says why `data` is no JSON; a lone surrogate is traced to its field, which msgspec does not do."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as bad:
        return Undecodable(f"the body is not UTF-8 (byte {bad.start})")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Undecodable(f"the body is not valid JSON: {error}")
    path = find_lone_surrogate(value)
    if path is not None:
        return InvalidRequest(f"{path} contains a lone surrogate, which is not text", param=path)
    return Undecodable(f"the body is not valid JSON: {error}")


def find_lone_surrogate(value: Any, path: str = "", depth: int = 0) -> str | None:
    """The path of the first string in a JSON value that cannot be encoded as UTF-8, or None."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, str):
        return None if _is_text(value) else path or "body"
    pairs: Any = ()
    if isinstance(value, dict):
        for key in value:
            if not _is_text(key):
                return path or "body"
        pairs = ((f"{path}.{key}" if path else key, item) for key, item in value.items())
    elif isinstance(value, list):
        pairs = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    return next((found for where, item in pairs if (found := find_lone_surrogate(item, where, depth + 1))), None)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
