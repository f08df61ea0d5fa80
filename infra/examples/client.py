"""A job over NATS with kvrelay's own client: python client.py [NATS_URL] [QUESTION]"""

import asyncio
import sys

from schemas.events import Finish, Token
from services.client import Client, Place


async def main(url: str = "nats://127.0.0.1:4222", question: str = "Name the capital of France.") -> None:
    async with await Client.connect(url) as client:
        job = await client.submit(messages=[{"role": "user", "content": question}], temperature=0)
        place = Place()
        async for event in client.stream(job, after=place):
            if isinstance(event, Token):
                print(event.text, end="", flush=True)
                if event.index == 2:
                    break  # the network fails here, say
        async for event in client.stream(job, after=place):  # goes on behind the last token
            if isinstance(event, Token | Finish):
                print(event.text, end="", flush=True)
        print()


asyncio.run(main(*sys.argv[1:]))
