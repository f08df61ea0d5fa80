"""nats-py's client with habits changed: three that would break a process that lives for weeks, two that cost time."""

from nats import errors
from nats.aio.client import Client, Srv
from nats.aio.subscription import Subscription

from services.bus.skimmer import OnRaw, SkimmingParser


class ReconnectingClient(Client):
    """Reaches into nats-py's internals, hence the pinned version; `tests/bus/test_connection.py` holds it to this."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: dict[bytes, OnRaw] = {}
        self._ps = SkimmingParser(self, self._listeners)

    @property
    def shown_key(self) -> str | None:
        """The public key of a user that shows no JWT. nats-py asks for it after the signature."""
        return self._public_nkey

    @shown_key.setter
    def shown_key(self, key: str) -> None:
        self._public_nkey = key

    async def listen(self, subject: str, on_raw: OnRaw) -> Subscription:
        """A subscription without a queue and a task of its own: `on_raw` is called by who reads the socket."""
        number = b"%d" % (self._sid + 1)  # what `subscribe` takes before it waits for anything
        self._listeners[number] = on_raw
        try:
            return await self.subscribe(subject)
        except BaseException:
            self._listeners.pop(number, None)
            raise

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        on_raw = self._listeners.get(b"%d" % sid)
        if on_raw is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        elif sid in self._subs:
            on_raw(data, headers or b"")

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._listeners.pop(b"%d" % sid, None)

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """nats-py looks at each character of a name in Python, which takes longer than all else it does."""
        found = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, colon, value = line.partition(":")
            name = name.strip()
            if colon and name.isascii() and len(name.split(None, 1)) < 2:
                found[name] = value.strip()
        return found

    async def _process_err(self, err_msg: str) -> None:
        """nats-py closes for ever on a `-ERR` it does not know; the server has hung up, so connect again instead."""
        if "permissions violation" in err_msg:
            await super()._process_err(err_msg)
        else:
            await self._process_op_err(errors.Error(f"nats: {err_msg}"))

    async def _connect_to_server(self, s: Srv) -> None:
        """nats-py leaves a connection that brought no greeting to the garbage collector, and tries the next."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.close()
        await super()._connect_to_server(s)

    def discard_pending(self) -> None:
        """Forgets what was not sent when the connection broke: a late nak would act on the next delivery."""
        self._pending = []
        self._pending_data_size = 0

    def forget_subscription(self, subscription: Subscription) -> None:
        """Ends one that could not be ended properly, so that a reconnect does not bring it back."""
        subscription._stop_processing()
        self._remove_sub(subscription._id)

    @property
    def clustered(self) -> bool:
        return bool(self._server_info.get("cluster"))
