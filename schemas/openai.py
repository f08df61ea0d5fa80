"""Bodies that OpenAI-compatible clients send, and the error shape that they get back.

Types are strict: "5" is no integer. A field that is known but not supported is refused by name, one that nobody
knows is ignored unless the caller of `parse_chat` or `parse_completion` asks for strictness.
"""

import re
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from schemas.errors import InvalidRequest, KvrelayError, TooLarge
from schemas.job import MAX_CHOICES, MAX_METADATA_BYTES, MAX_TIMEOUT_S, MAX_TOP_LOGPROBS, Tool, ToolCall
from schemas.json_object import read_object
from schemas.openai_fields import ELSEWHERE, UNSUPPORTED, WITHOUT_EFFECT
from schemas.response_format import ResponseFormat, Text
from schemas.response_format import ToolCall as ToolCallFormat
from schemas.wire import translate

MAX_OPENAI_STOPS = 4
MAX_PROMPTS = 128  # prompts of one /v1/completions request; each becomes a job
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default on /v1/completions; chat goes up to the context

TokenCount = Annotated[int, Meta(ge=1, le=2**53)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
Prompts = str | list[int | str | list[int]]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted, never done
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ToolName(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: ToolName


class ChatMessage(msgspec.Struct, frozen=True):
    """`name` is accepted and not rendered: the templates that we serve have no place for it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What both routes take. None is what OpenAI's clients send for "not given"."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**53)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_OPENAI_STOPS)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[Annotated[int, Meta(ge=0, lt=2**32)], Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    timeout_s: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT_S)] | None = None
    ttft_timeout_s: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT_S)] | None = None
    response_format: ResponseFormat | None = None
    metadata: dict[str, Any] | None = None
    include_metrics: bool | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("give max_tokens or max_completion_tokens, not both", param="max_completion_tokens")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise unsupported("stream_options.continuous_usage_stats")
        if self.metadata and len(msgspec.json.encode(self.metadata)) > MAX_METADATA_BYTES:
            raise TooLarge(f"metadata is limited to {MAX_METADATA_BYTES} bytes as JSON", param="metadata")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def answer_format(self) -> ResponseFormat | None:
        """What the answer is held to."""
        return self.response_format

    @property
    def has_tools(self) -> bool:
        """Whether the model is shown tools, and its calls are read."""
        return False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class ChatRequest(Request, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None  # accepted: how many calls there are is the model's to decide

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        names = [tool.function.name for tool in self.tools or []]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise InvalidRequest("tool_choice names none of the tools", param="tool_choice")
        if self.has_tools and self.response_format is not None and not isinstance(self.response_format, Text):
            raise InvalidRequest("response_format leaves no room for calls of tools", param="response_format")

    @property
    def answer_format(self) -> ResponseFormat | None:
        """What the answer is held to: a call, if one is asked for."""
        if self.tool_choice in (None, "none", "auto"):
            return self.response_format
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        functions = [tool.function for tool in self.tools or [] if named in (None, tool.function.name)]
        return ToolCallFormat({function.name: function.parameters or {} for function in functions})

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Request, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.echo and self.logprobs is not None:
            raise unsupported("echo", "with logprobs")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "other than n")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        return super().token_limit or DEFAULT_COMPLETION_TOKENS

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt, in order. Raises `InvalidRequest` for an empty, mixed or over-long list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt is empty: there is nothing to continue", param="prompt")
        kinds = {type(item) for item in self.prompt}
        if len(kinds) > 1:
            raise InvalidRequest("prompt must be a string, or a list of one kind: strings or ids", param="prompt")
        if kinds == {int}:
            return [[item for item in self.prompt if isinstance(item, int)]]
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"{len(self.prompt)} prompts in one request, at most {MAX_PROMPTS}", param="prompt")
        return [item for item in self.prompt if not isinstance(item, int)]


R = TypeVar("R", bound=Request)
_MISSING = re.compile(r"missing required field `(\w+)`")
_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def unsupported(name: str, what: str = "") -> InvalidRequest:
    return InvalidRequest(f"{name} {what + ' ' if what else ''}is not supported: leave it out", param=name)


def parse_chat(data: bytes, *, strict: bool = False) -> ChatRequest:
    """Raises `InvalidRequest` or `TooLarge`, naming the field."""
    return _parse(data, _chat_decoder, ChatRequest, strict)


def parse_completion(data: bytes, *, strict: bool = False) -> CompletionRequest:
    """Raises `InvalidRequest` or `TooLarge`, naming the field."""
    return _parse(data, _completion_decoder, CompletionRequest, strict)


def _parse(data: bytes, decoder: "msgspec.json.Decoder[R]", kind: type[R], strict: bool) -> R:
    fields = read_object(data)
    strangers = {name: harmless for name, harmless in ELSEWHERE.items() if name not in kind.__struct_fields__}
    for name, harmless in (UNSUPPORTED | strangers).items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name)
    if strict:
        _refuse_unknown(fields, kind)
    try:
        return translate(decoder, data)
    except InvalidRequest as error:
        missing = _MISSING.search(error.message) if error.param is None else None
        param = missing.group(1) if missing else _field_of(error.param)
        raise type(error)(error.message, param=param) from error


def _refuse_unknown(fields: dict[str, Any], kind: type[Request]) -> None:
    known = {*kind.__struct_fields__, *UNSUPPORTED, *WITHOUT_EFFECT}
    unknown = [name for name in fields if name not in known]
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        keys = message if isinstance(message, dict) else {}
        unknown += [f"messages[{i}].{key}" for key in keys if key not in ChatMessage.__struct_fields__]
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0][:80]}", param=unknown[0][:80])


def _field_of(path: str | None) -> str | None:
    """`prompt[3]`, `logit_bias[...]`: clients look for the field's own name; in messages the path says more."""
    if path is None or path.startswith("messages["):
        return path
    return path.partition("[")[0]


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    error: ErrorObject


def error_body(error: KvrelayError, *, code: str | None = None) -> ErrorBody:
    """OpenAI's error object, `{"error": {...}}`. What it quotes of a broken request is made text again."""
    message = error.message.encode("utf-8", "replace").decode("utf-8")
    param = error.param.encode("utf-8", "replace").decode("utf-8") if error.param is not None else None
    return {"error": {"message": message, "type": error.type, "param": param, "code": code or error.code}}
