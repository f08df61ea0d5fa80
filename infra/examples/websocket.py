"""Answers over WebSocket, for pages that cannot speak NATS: python websocket.py [NATS_URL] [PORT]

A page sends one JSON object: a job, or {"resume": id, "after": index} to go on behind token `index` of a job of one
choice. Each event comes back as a JSON message, `done` or `error` last; then the socket is closed. Leaving stops
nothing: come back with `resume`.
"""

import asyncio
import json
import sys

from aiohttp import web

from schemas.errors import KvrelayError
from schemas.events import Error, Token, to_builtins
from services.client import Client


async def listen(request: web.Request) -> web.WebSocketResponse:
    client: Client = request.app["client"]
    socket = web.WebSocketResponse(heartbeat=20.0)
    await socket.prepare(request)
    asked = await socket.receive_json()
    after = asked.get("after", -1)
    try:
        job = asked["resume"] if "resume" in asked else await client.submit(**asked)
        if "resume" not in asked:
            await socket.send_json({"type": "accepted", "job": job.id})
        async for event in client.stream(job):
            if not isinstance(event, Token) or event.index > after:
                await socket.send_json(to_builtins(event))
    except KvrelayError as error:
        await socket.send_json(to_builtins(Error.of(error)))
    await socket.close()
    return socket


async def main(url: str = "nats://127.0.0.1:4222", port: str = "8081") -> None:
    app = web.Application()
    app.router.add_get("/", listen)
    async with await Client.connect(url) as client:
        app["client"] = client
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", int(port))
        await site.start()
        print(json.dumps({"url": f"ws://127.0.0.1:{runner.addresses[0][1]}/"}), flush=True)
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
