"""All reply subjects of a connection behind one subscription: a request costs a dictionary entry."""

import itertools
from collections.abc import Callable

from nats.aio.msg import Msg

OnReply = Callable[[Msg | None], None]


class Inbox:
    """`expect` makes a reply subject that is listened to until `forget`, or until the connection breaks."""

    def __init__(self, prefix: str) -> None:
        self.subject = f"{prefix}.*"
        self._prefix = f"{prefix}."
        self._tokens = itertools.count()
        self._expected: dict[str, OnReply] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, on_reply: OnReply) -> str:
        """`on_reply` gets every message on the subject returned, at last None if the connection breaks."""
        reply = f"{self._prefix}{next(self._tokens)}"
        self._expected[reply] = on_reply
        return reply

    def forget(self, reply: str) -> None:
        self._expected.pop(reply, None)

    async def deliver(self, message: Msg) -> None:
        on_reply = self._expected.get(message.subject)
        if on_reply is not None:
            on_reply(message)

    def broke(self) -> None:
        """No answer will come any more to what was asked before."""
        waiting, self._expected = self._expected, {}
        for on_reply in waiting.values():
            on_reply(None)
