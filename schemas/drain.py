"""What a worker answers when it is asked to leave."""

import msgspec

from schemas.wire import WIRE_VERSION


class DrainReply(msgspec.Struct, frozen=True, kw_only=True):
    """`grace_s`: it will be gone in that time. `running`: sequences that it has now."""

    v: int = WIRE_VERSION
    process: str
    grace_s: float
    running: int


drain_reply_decoder = msgspec.json.Decoder(DrainReply)
