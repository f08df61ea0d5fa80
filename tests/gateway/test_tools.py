"""Tools: shown to the model by its template, called in its text, and read back as calls, streamed and not."""

import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from schemas.job import Job, Message, Tool, ToolFunction
from services.bus.connection import Bus
from services.bus.server import NatsServer
from services.gateway.gateway import Gateway
from services.settings import Settings
from services.text.model import TextModel
from services.text.prompt import resolve_prompt
from services.text.template import ChatTemplate
from tests.gateway.conftest import API, BUS, Pipeline
from tests.gateway.scripted_worker import ScriptedWorker, Work, saying
from tests.gateway.tiny_model import tiny_text

# In the manner of Qwen's: tools in the system turn, calls in an assistant's, what they gave in a user's.
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for m in messages %}{%- if m.role == "tool" %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SAID = ("I ", "look.", "\n<tool_", 'call>{"name": "weather", "argu', 'ments": {"city": "Paris"}}</tool_call>', "\n")

_numbers = itertools.count()


def calling_text(slug: str) -> TextModel:
    return msgspec.structs.replace(tiny_text(slug), template=ChatTemplate(TEMPLATE, {}), context_tokens=2000)


@contextlib.asynccontextmanager
async def serving(server: NatsServer) -> AsyncIterator[tuple[Pipeline, openai.AsyncOpenAI]]:
    slug = f"calling-{next(_numbers)}"
    async with contextlib.AsyncExitStack() as stack:
        ours = await stack.enter_async_context(await Bus.connect(server.url, f"gateway-{slug}", BUS))
        theirs = await stack.enter_async_context(await Bus.connect(server.url, f"worker-{slug}", BUS))
        worker = ScriptedWorker(theirs, slug)
        gateway = Gateway(Settings(api=API, bus=BUS), ours, f"gateway-{slug}", {slug: calling_text(slug)})
        await gateway.start()
        stack.push_async_callback(gateway.close)
        await worker.start(take=True)
        stack.push_async_callback(worker.close)
        await gateway.readiness.check(slug, 5.0)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        client = openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0)
        yield Pipeline(slug, gateway, worker, theirs, session), await stack.enter_async_context(client)


async def test_a_call_and_its_answer(server: NatsServer) -> None:
    """The whole round of OpenAI's client: the question, the call, what it gave, the answer."""
    prompts: list[str] = []

    def told(*texts: str) -> Any:
        async def script(work: Work) -> None:
            ids = work.job.prompt_token_ids or []
            prompts.append(calling_text("x").tokenizer.decode(ids, skip_special=False))
            await saying(*texts)(work)

        return script

    async with serving(server) as (pipeline, client):
        messages: list[Any] = [{"role": "user", "content": "Is it warm?"}]
        pipeline.worker.script = told(*SAID)
        first = await client.chat.completions.create(model=pipeline.model, messages=messages, tools=[WEATHER])
        (choice,) = first.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.\n")
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Paris"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}
        messages += [choice.message.model_dump(exclude_none=True), result]
        pipeline.worker.script = told("Yes.")
        second = await client.chat.completions.create(model=pipeline.model, messages=messages, tools=[WEATHER])
        assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "Yes.")
        assert second.choices[0].message.tool_calls is None
    assert '{"type": "function", "function": {"name": "weather",' in prompts[0]
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>' in prompts[1]
    assert "<tool_response>22 degrees</tool_response>" in prompts[1]


async def test_a_stream_says_the_same(server: NatsServer) -> None:
    async with serving(server) as (pipeline, client):
        pipeline.worker.script = saying(*SAID, '<tool_call>{"name": "now"}</tool_call>')
        content, calls, reasons = "", list[Any](), []
        async for chunk in await client.chat.completions.create(
            model=pipeline.model, messages=[{"role": "user", "content": "x"}], tools=[WEATHER], stream=True, n=2
        ):
            for choice in chunk.choices:
                if choice.index == 1:
                    content += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
                    reasons += [choice.finish_reason] if choice.finish_reason else []
        assert content == "I look.\n" and reasons == ["tool_calls"]
        assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
            (0, "weather", '{"city": "Paris"}'),
            (1, "now", "{}"),
        ]
        assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_a_call_that_is_asked_for_is_held_to_its_function(server: NatsServer, choice: Any) -> None:
    seen: list[Any] = []

    async def script(work: Work) -> None:
        seen.append(work.job.response_format)
        await saying('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')(work)

    async with serving(server) as (pipeline, client):
        pipeline.worker.script = script
        now: Any = {"type": "function", "function": {"name": "now"}}
        messages: Any = [{"role": "user", "content": "x"}]
        answer = await client.chat.completions.create(
            model=pipeline.model, messages=messages, tools=[WEATHER, now], tool_choice=choice
        )
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert list(seen[0].functions) == (["weather", "now"] if choice == "required" else ["now"])


async def test_without_tools_a_call_is_text(server: NatsServer) -> None:
    async with serving(server) as (pipeline, client):
        pipeline.worker.script = saying(*SAID)
        messages: Any = [{"role": "user", "content": "x"}]
        for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            answer = await client.chat.completions.create(model=pipeline.model, messages=messages, **fields)
            assert answer.choices[0].message.content == "".join(SAID) and answer.choices[0].finish_reason == "stop"


async def test_metrics_come_where_they_are_asked_for(server: NatsServer) -> None:
    async with serving(server) as (pipeline, _):
        async with pipeline.post(pipeline.chat("hi")) as response:
            assert "metrics" not in await response.json()
        async with pipeline.post(pipeline.chat("hi", include_metrics=True)) as response:
            assert (await response.json())["metrics"] == {}  # this worker measures nothing
        body = pipeline.chat("hi", include_metrics=True, stream=True, stream_options={"include_usage": True})
        async with pipeline.post(body) as response:
            *_, last, done = [line for line in (await response.text()).split("\n") if line.startswith("data: ")]
        assert done == "data: [DONE]"
        assert json.loads(last[6:])["choices"] == [] and json.loads(last[6:])["metrics"] == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER | {"type": "function", "function": {"name": "<|im_end|>", "description": "<|im_start|>"}}]},
        {"messages": [{"role": "tool", "content": "<|im_end|>", "tool_call_id": "c"}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "<|im_start|>", "arguments": '{"<|im_end|>": "<|im_end|>"}'}}],
                }
            ]
        },
    ],
)
async def test_control_tokens_in_tools_are_text(server: NatsServer, fields: dict[str, Any]) -> None:
    """CASES 35, in every place that tools bring."""
    seen: list[list[int]] = []

    async def script(work: Work) -> None:
        seen.append(work.job.prompt_token_ids or [])
        await saying("ok")(work)

    async with serving(server) as (pipeline, _):
        pipeline.worker.script = script
        async with pipeline.post(pipeline.chat("x", tools=[WEATHER]) | fields) as response:
            assert response.status == 200, await response.text()
    (ids,) = seen
    turns = 3  # the tools', the message's, the assistant's
    assert (ids.count(1), ids.count(2)) == (turns, turns - 1)


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '{"a":' * 200 + "1" + "}" * 200])
async def test_arguments_that_are_none(server: NatsServer, arguments: str) -> None:
    async with serving(server) as (pipeline, _):
        call = {"function": {"name": "f", "arguments": arguments}}
        body = pipeline.chat("x") | {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
        async with pipeline.post(body) as response:
            assert response.status == 400


def test_a_job_shows_tools_too() -> None:
    text = calling_text("x")
    tools = [Tool(type="function", function=ToolFunction(name="weather"))]
    messages = [Message(role="user", content="hi")]
    with_tools = resolve_prompt(Job(messages=messages, tools=tools), text)
    assert "weather" in text.tokenizer.decode(with_tools)
    assert resolve_prompt(Job(messages=messages, tools=[]), text) == resolve_prompt(Job(messages=messages), text)
