"""A gateway in front of a pipeline, in the test's own process."""

import contextlib
from collections.abc import AsyncIterator

import msgspec

from services.gateway.gateway import Gateway
from services.settings import Api, Settings
from tests.pipeline.local import LocalPipeline

MODEL = "smollm2-135m-instruct"


@contextlib.asynccontextmanager
async def gateway_of(pipeline: LocalPipeline) -> AsyncIterator[str]:
    """Its base URL, with `/v1`."""
    settings = msgspec.structs.replace(Settings(), api=Api(port=0, resume_grace_s=0.0))
    gateway = Gateway(settings, pipeline.bus, "gateway-test", {pipeline.text.slug: pipeline.text})
    await gateway.start()
    try:
        yield f"{gateway.url}/v1"
    finally:
        await gateway.close()
