"""What a gateway's streams are measured beside: Starlette's StreamingResponse with a json.dumps for each token.

A program of its own: `python starlette_peer.py PORT STEP_S GROUPS`. Streams of one group wake together, as
those of one decode worker do. All streams that are open begin on `GET /begin?tokens=`, and end on `GET /end`.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


class Steps:
    """Wakes each group of streams once a step."""

    def __init__(self, step_s: float, num_groups: int) -> None:
        self._num_tokens = 0
        self._step_s = step_s
        self._ticks = [asyncio.Event() for _ in range(num_groups)]
        self._num_open = 0
        self._ended = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def begin(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._ended.clear()
        self._running = asyncio.create_task(self._run())

    def end(self) -> None:
        self._ended.set()

    async def tokens(self) -> AsyncIterator[int]:
        """The numbers of an answer's tokens, each when it is made."""
        group = self._num_open % len(self._ticks)
        self._num_open += 1
        number = 0
        while number == 0 or number < self._num_tokens:
            await self._ticks[group].wait()
            yield number
            number += 1
        await self._ended.wait()

    async def _run(self) -> None:
        share_s = self._step_s / len(self._ticks)
        next_s = time.monotonic()
        for _ in range(self._num_tokens):
            for group, tick in enumerate(self._ticks):
                next_s += share_s
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                self._ticks[group] = asyncio.Event()
                tick.set()


def application(steps: Steps) -> Starlette:
    async def chat(request: Request) -> StreamingResponse:
        await request.json()

        async def events() -> AsyncIterator[str]:
            async for _ in steps.tokens():
                delta = {"content": f" {time.monotonic_ns()}"}
                chunk = {
                    "id": "chatcmpl-0123456789abcdef01234567",
                    "object": "chat.completion.chunk",
                    "created": 1_800_000_000,
                    "model": "bench",
                    "system_fingerprint": "0123456789ab",
                    "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}],
                }
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def begin(request: Request) -> Response:
        steps.begin(int(request.query_params["tokens"]))
        return Response()

    async def end(_: Request) -> Response:
        steps.end()
        return Response()

    async def ready(_: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/begin", begin),
            Route("/end", end),
            Route("/ready", ready),
        ]
    )


def main() -> None:
    port, step_s, groups = sys.argv[1:]
    steps = Steps(float(step_s), int(groups))
    uvicorn.run(application(steps), port=int(port), log_level="warning", access_log=False, backlog=2048)


if __name__ == "__main__":
    main()
