"""OpenAI requests to jobs. Everything that can be refused about a request is refused here, before the bus hears of it.

A published job carries token ids: workers need no template, and what was checked is what runs.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

from msgspec import UNSET

from schemas.errors import InvalidRequest
from schemas.job import Job, Message, Role
from schemas.openai import ChatMessage, ChatRequest, CompletionRequest, ContentPart, Request, unsupported
from services.openai.request_names import job_id
from services.text.model import TextModel
from services.text.prompt import resolve_prompt

INLINE_CHARS = 4096  # longer prompts are tokenised in a thread, so that the other streams go on meanwhile
MESSAGE_CHARS = 64  # what rendering one message costs, in characters of text

_ROLES: dict[str, Role] = {role: role for role in get_args(Role)}
_UNSUPPORTED_ROLES = ("function",)


async def jobs_of(request: Request, text: TextModel, key: str, owner: str | None) -> list[Job]:
    """One job a prompt, in order, with ids derived from `key`. Raises `InvalidRequest`, naming the field.

    `owner`: the process whose end is the jobs' end; None: they go on whoever leaves.
    """
    _check_bias(request, text)
    prompts = _prompts(request)
    shared = _shared(request, text, owner)
    jobs = [
        await _job({"id": job_id(key, i, len(prompts)), **given, **shared}, text) for i, given in enumerate(prompts)
    ]
    if (wanted := jobs[0].constraint) is not None:
        await text.grammars.check(wanted)
    return jobs


def _prompts(request: Request) -> list[dict[str, Any]]:
    if isinstance(request, ChatRequest):
        messages = [_message(m, f"messages[{i}]") for i, m in enumerate(request.messages)]
        return [{"messages": messages, "tools": request.tools if request.has_tools else UNSET}]
    assert isinstance(request, CompletionRequest)
    return [{"prompt" if isinstance(p, str) else "prompt_token_ids": p} for p in request.prompts()]


def echoes_of(request: Request, jobs: Sequence[Job], text: TextModel) -> list[str]:
    """What each answer begins with: its prompt, where the client asked for that, as text."""
    if not isinstance(request, CompletionRequest) or not request.echo:
        return [""] * len(jobs)
    return [
        prompt if isinstance(prompt, str) else text.tokenizer.decode(prompt, skip_special=False)
        for prompt in request.prompts()
    ]


def _shared(request: Request, text: TextModel, owner: str | None) -> dict[str, Any]:
    """Everything but id and prompt. What the client left out stays at the job's own default."""
    given = {
        "max_tokens": request.token_limit,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "seed": request.seed,
        "n": request.n,
        "ignore_eos": request.ignore_eos,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": request.logit_bias,
        "timeout_s": request.timeout_s,
        "ttft_timeout_s": request.ttft_timeout_s,
        "cache_salt": request.cache_salt,
        "metadata": request.metadata,
        "response_format": request.answer_format,
        "logprobs": num_logprobs(request),
    }
    return {
        "model": text.slug,
        "stop": request.stops,
        "owner": owner,
        "on_disconnect": "continue" if owner is None else "cancel",
        **{name: value for name, value in given.items() if value is not None},
    }


def num_logprobs(request: Request) -> int | None:
    assert isinstance(request, ChatRequest | CompletionRequest)
    return request.num_logprobs


def _message(message: ChatMessage, path: str) -> Message:
    if message.role in _UNSUPPORTED_ROLES:
        raise unsupported(f"{path}.role", f"{message.role!r}")
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"unknown role {message.role[:40]!r}: use one of {', '.join(_ROLES)}", param=f"{path}.role"
        )
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise unsupported(f"{path}.{name}")
    if message.content is None:
        if role != "assistant":
            raise InvalidRequest(f"content of a {role} message must not be null", param=f"{path}.content")
        return Message(role, message.refusal or "", message.tool_calls or [])
    content = _text(message.content, f"{path}.content")
    return Message(role, content, message.tool_calls or [], message.tool_call_id or "")


def _text(content: str | Sequence[ContentPart], path: str) -> str:
    """Text parts are joined without anything between, as the parts of one text."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text":
            raise unsupported(f"{path}[{i}]", f"of type {part.type[:40]!r}")
        if part.text is None:
            raise InvalidRequest("a text part needs text", param=f"{path}[{i}].text")
    return "".join(part.text or "" for part in content)


def _check_bias(request: Request, text: TextModel) -> None:
    size = text.vocab_size
    bad = next((id_ for id_ in request.logit_bias or {} if id_ >= size), None)
    if bad is not None:
        raise InvalidRequest(f"logit_bias has id {bad}, the vocabulary ends at {size - 1}", param="logit_bias")


async def _job(fields: dict[str, Any], text: TextModel) -> Job:
    """A job with its prompt as token ids. What is wrong with them is said of the field that the client used."""
    try:
        job = Job(**fields)
        if _size_chars(job) <= INLINE_CHARS:
            ids = resolve_prompt(job, text)
        else:
            ids = await asyncio.to_thread(resolve_prompt, job, text)
    except InvalidRequest as error:
        param = "prompt" if error.param == "prompt_token_ids" else error.param
        raise type(error)(error.message.replace("prompt_token_ids", "prompt"), param=param) from error
    return Job(**{**fields, "prompt": None, "messages": None, "tools": UNSET, "prompt_token_ids": ids})


def _size_chars(job: Job) -> int:
    messages = job.messages or []
    texts = len(job.prompt or "") + sum(len(message.content) for message in messages) + 1000 * len(job.tools or [])
    return texts + MESSAGE_CHARS * len(messages) + len(job.prompt_token_ids or [])
