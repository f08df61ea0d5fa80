"""What a grammar is made from."""

from typing import Any

import msgspec

from schemas.response_format import Constrained, ToolCall, schema_of
from services.text.tool_format import CLOSING, OPENING


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """JSON after `schema`, whose keys come in its order, between two fixed texts."""

    schema: dict[str, Any]
    before: str = ""
    after: str = ""

    @classmethod
    def of(cls, wanted: Constrained) -> "Source":
        is_call = isinstance(wanted, ToolCall)
        return cls(schema_of(wanted), f"{OPENING}\n" if is_call else "", f"\n{CLOSING}" if is_call else "")
