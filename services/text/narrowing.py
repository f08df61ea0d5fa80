"""What a schema leaves open without meaning to, closed: small models write digits for ever where nothing stops them.

An answer to the narrower schema is one to the caller's. Strings and arrays stay as long as the caller lets them be:
how much there is to say is the model's to decide.
"""

from typing import Any

MAX_NUMBER = 2**53 - 1  # beyond it, readers of JSON differ about a number (RFC 8259, section 6)
DECIMALS = 1e-9
FRACTION = r"^[^.]*(\.[0-9]{1,6}([Zz+-].*)?)?$"  # of a second

# Keywords with values that are data, names of subschemas, or lists of them. Any other value is a subschema, if at all.
_DATA = ("enum", "const", "default", "examples")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def narrowed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [narrowed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _inner(key, value) for key, value in schema.items()}
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" in kinds or "number" in kinds:
        inner |= _bounds(schema)
    if "number" in kinds and "multipleOf" not in schema and {"minimum", "maximum"} <= inner.keys():
        inner["multipleOf"] = DECIMALS
    if schema.get("format") in ("time", "date-time") and "pattern" not in schema:
        inner["pattern"] = FRACTION
    return inner


def _inner(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key in _NAMED and isinstance(value, dict):
        return {name: narrowed(part) for name, part in value.items()}
    return narrowed(value)


def _bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Those that are missing, where they leave room for the others."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    found = {}
    if high is None and (low is None or _is_below(low, MAX_NUMBER)):
        found["maximum"] = MAX_NUMBER
    if low is None and (high is None or _is_below(-MAX_NUMBER, high)):
        found["minimum"] = -MAX_NUMBER
    return found


def _is_below(low: Any, high: Any) -> bool:
    """Of what may be no numbers at all: the schema is wrong then, and refused for it later."""
    return isinstance(low, int | float) and isinstance(high, int | float) and low < high
