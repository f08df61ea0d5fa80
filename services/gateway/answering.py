"""From the events of a request's jobs to its client: as a stream, or whole."""

from aiohttp import web

from schemas.errors import KvrelayError
from schemas.events import Event
from services.gateway.event_stream import EventStream
from services.gateway.inbox import ClientGone, Ended, Inbox
from services.openai.answer import Answer


async def stream_answer(stream: EventStream, inbox: Inbox, answer: Answer, keepalive_s: float) -> web.StreamResponse:
    """An error before the reader has got anything is raised; a later one is the stream's last event.

    A reader who comes back hears at once that it was found.
    """

    def send_at_once(prompt: int, events: list[Event]) -> bool:
        """Tokens in the middle of an answer need nobody to wake up for them."""
        if not stream.has_room or not answer.expects_tokens(events):
            return False
        stream.send_now(answer.add([(prompt, event) for event in events]))
        return True

    try:
        if not answer.is_untold:
            await stream.keep_alive()
        inbox.at_once = send_at_once
        with stream.not_silent_for(keepalive_s, inbox.nudge):
            while not answer.is_complete:
                arrived = await inbox.get()
                chunks = answer.add(arrived)
                if not arrived:
                    await stream.keep_alive()
                elif not answer.is_complete:
                    await stream.send(chunks)
        inbox.at_once = None
        await stream.finish([*chunks, *answer.ending()])
    except ConnectionError as error:
        raise ClientGone("the client went away") from error
    except ClientGone:
        raise
    except KvrelayError as error:
        inbox.at_once = None
        reason = error.error if isinstance(error, Ended) else error
        if not stream.has_begun and answer.is_untold:
            raise reason from error
        await stream.finish([answer.failure(reason) if isinstance(error, Ended) else answer.interruption(reason)])
    return stream.response


async def whole_answer(inbox: Inbox, answer: Answer) -> web.Response:
    try:
        while not answer.is_complete:
            answer.take(await inbox.get())
    except Ended as end:
        raise end.error from end
    return web.Response(body=answer.whole(), content_type="application/json")
