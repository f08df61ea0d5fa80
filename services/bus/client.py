"""nats-py's client with three habits changed that would break a process that lives for weeks."""

from nats import errors
from nats.aio.client import Client, Srv
from nats.aio.subscription import Subscription


class ReconnectingClient(Client):
    """Reaches into nats-py's internals, hence the pinned version; `tests/bus/test_connection.py` holds it to this."""

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
