"""Bodies that OpenAI-compatible clients get: whole answers, and the chunks of a stream."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from schemas import events

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot spell

FinishReason = Literal[
    "stop", "length", "tool_calls"
]  # beside it vLLM's `stop_reason`: the stop string that matched, or null


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens; `prompt_tokens_details.cached_tokens` of the prompt were found in the store."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, parts: list[events.Usage]) -> "Usage":
        """The sum over the jobs of one request."""
        prompt = sum(part.prompt_tokens for part in parts)
        completion = sum(part.completion_tokens for part in parts)
        cached = sum(part.cached_tokens for part in parts)
        return cls(prompt, completion, prompt + completion, CachedTokens(cached))


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry a token in each list; `text_offset` counts characters of the generated text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CalledFunction(msgspec.Struct, frozen=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """`index` is there in chunks only, each of which has a call whole."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    """Of a whole answer or of a chunk: the two have one shape."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: dict[str, float] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is null on all chunks but the last when the client asked for it, and absent otherwise."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: dict[str, float] | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk is the same without `usage`, or with the same rule for it as in `ChatChunk`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: dict[str, float] | UnsetType = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`context_length` (tokens; that of an upstream is not known) and `builds` (those with live workers) are ours."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvrelay"
    context_length: int | UnsetType = UNSET
    builds: list[str]


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: str = "list"
