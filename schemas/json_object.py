"""A JSON object from a stranger: limits first, and nothing that two readers could understand differently."""

import codecs
import json
import sys
from collections import Counter
from typing import Any

from schemas.errors import InvalidRequest
from schemas.wire import MAX_DEPTH


def read_object(data: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises `InvalidRequest`.

    msgspec takes the last of two equal keys; here that is refused, at any depth.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        what = "it begins with a byte order mark" if data.startswith(codecs.BOM_UTF8) else str(error)
        raise InvalidRequest(f"the body is not valid JSON: {what}") from error
    except ValueError as error:  # Python does not read the longest integers, which would take it quadratic time
        limit = sys.get_int_max_str_digits()
        raise InvalidRequest(f"the body has an integer of more than {limit} digits") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_depth(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise InvalidRequest(f"the key {twice[:80]!r} is given twice", param=twice[:80])
    return found


def _no_constant(name: str) -> None:
    raise InvalidRequest(f"the body is not valid JSON: {name} is no JSON number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")
