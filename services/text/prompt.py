"""A job's prompt as token ids, checked against the model before anything is queued or computed."""

from datetime import datetime

from schemas.errors import ContextLengthExceeded, InvalidRequest
from schemas.job import Job, Message, Tool
from services.text.model import TextModel


def resolve_prompt(job: Job, text: TextModel, now: datetime | None = None) -> list[int]:
    """Prompt token ids of a job, at least one and with room for one more token in the context.

    `messages` go through the chat template, in which a control token that somebody typed stays text. In a raw
    `prompt` control tokens are *parsed*, and the tokenizer adds its own start token if it has one: who sends a raw
    prompt writes the whole of it, turn markers included. `now`: see `ChatTemplate.render`.
    Raises `InvalidRequest` (with `param`) and `ContextLengthExceeded`; a text that is certainly too long is refused
    in milliseconds.
    """
    if job.prompt_token_ids is not None:
        ids = _checked_ids(job.prompt_token_ids, text.vocab_size)
        param = "prompt_token_ids"
    elif job.messages is not None:
        ids = _messages_ids(job.messages, job.tools or [], text, now)
        param = "messages"
    else:
        prompt = job.prompt or ""
        _check_unicode(prompt, "prompt")
        _check_floor(prompt, text, "prompt")
        ids = text.tokenizer.encode_prompt(prompt)
        param = "prompt"
    if not ids:
        raise InvalidRequest(f"{param} has no tokens: there is nothing to continue", param=param)
    if len(ids) + 1 > text.context_tokens:
        raise _too_long(f"{len(ids)}", text.context_tokens, param)
    return ids


def resolve_max_tokens(job: Job, num_prompt_tokens: int, context_tokens: int) -> int:
    """How many tokens a choice may have: what was asked for, at most up to the end of the context."""
    room = context_tokens - num_prompt_tokens
    return room if job.max_tokens is None else min(job.max_tokens, room)


def _messages_ids(messages: list[Message], tools: list[Tool], text: TextModel, now: datetime | None) -> list[int]:
    if text.template is None:
        raise InvalidRequest(f"model {text.slug} has no chat template: send a prompt instead", param="messages")
    if len(messages) > text.context_tokens:  # a turn takes a token at least, and rendering takes 30 us
        raise _too_long(f"at least {len(messages)}", text.context_tokens, "messages")
    for index, message in enumerate(messages):
        _check_unicode(message.content, f"messages[{index}].content")
        if (message.role == "tool" or message.tool_calls) and not text.template.has_calls:
            raise _no_tools(
                text, f"messages[{index}].role" if message.role == "tool" else f"messages[{index}].tool_calls"
            )
    if tools and not text.template.has_calls:
        raise _no_tools(text, "tools")
    guarded = text.template.render_guarded(messages, text.tokenizer.control, tools=tools, now=now)
    _check_floor(guarded.unguarded(), text, "messages")
    return text.tokenizer.encode_guarded(guarded)


def _no_tools(text: TextModel, param: str) -> InvalidRequest:
    return InvalidRequest(f"tools are not supported by model {text.slug}: its chat template shows it none", param=param)


def _checked_ids(ids: list[int], vocab_size: int) -> list[int]:
    for position, id_ in enumerate(ids):
        if not 0 <= id_ < vocab_size:
            raise InvalidRequest(
                f"prompt_token_ids[{position}] is {id_}: this model's ids are 0 to {vocab_size - 1}",
                param="prompt_token_ids",
            )
    return list(ids)


def _check_unicode(value: str, param: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} contains a lone surrogate (character {error.start})", param=param) from None


def _check_floor(value: str, text: TextModel, param: str) -> None:
    floor = text.tokenizer.min_tokens(value)
    if floor + 1 > text.context_tokens:
        raise _too_long(f"at least {floor}", text.context_tokens, param)


def _too_long(num_tokens: str, context_tokens: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {num_tokens} tokens; this model's context is {context_tokens} tokens, "
        "of which at least one must be left for the answer",
        param=param,
    )
