"""A job as clients publish it, its limits, and the form that the first worker resolves it to."""

import hashlib
import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from schemas.errors import InvalidRequest
from schemas.response_format import MAX_SCHEMA_DEPTH, Constrained, ResponseFormat, Text, depth_of
from schemas.subjects import JOB_ID, check_job_id
from schemas.wire import WIRE_VERSION, decode_versioned

MAX_TIMEOUT_S = 3600.0
MAX_STOPS = 16
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_METADATA_BYTES = 64 * 1024
PROMPTS = ("prompt", "messages", "prompt_token_ids")  # a job has exactly one of them

Role = Literal["system", "developer", "user", "assistant", "tool"]
OnDisconnect = Literal["continue", "cancel"]


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`arguments` is JSON text, as OpenAI has it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A turn of a `tool` answers the call `tool_call_id`; an assistant's may have `tool_calls`."""

    role: Role
    content: str
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""


class ToolFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`parameters` is a JSON Schema that the model is shown; `strict` is accepted."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if self.parameters is not None and depth_of(self.parameters) > MAX_SCHEMA_DEPTH:
            raise InvalidRequest(f"parameters of a tool are limited to {MAX_SCHEMA_DEPTH} levels", param="tools")


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ToolFunction


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. The order is logit_bias and penalties, temperature, top_k, top_p, min_p, per row.

    temperature 0 (or so small that it makes no difference) and top_k 1 are greedy; ties go to the lowest id.
    `logprobs` is the number of alternatives wanted beside the chosen token's, None for none at all.
    `max_tokens` None means up to the model's context; more than fits is clamped to it.
    `response_format` forbids the tokens that lead elsewhere, before all that; once the answer is complete only an end
    token is left. Unset, it is not written either: a job without one is read by workers that do not know it.
    """

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=MAX_STOPS)] = []
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    ignore_eos: bool = False
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    logit_bias: dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=-100.0, le=100.0)]] = {}
    response_format: ResponseFormat | UnsetType | None = UNSET

    @property
    def constraint(self) -> Constrained | None:
        """What the answer is held to."""
        wanted = self.response_format
        return None if wanted is None or isinstance(wanted, UnsetType | Text) else wanted


class Job(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request. Exactly one of `prompt`, `messages` and `prompt_token_ids` is given.

    `tools` are shown to the model by its chat template; its calls come as text.

    Durations are in seconds and count from the broker's timestamp of the job.
    """

    v: int = WIRE_VERSION
    id: Annotated[str, Meta(extra_json_schema={"pattern": f"^{JOB_ID}$"})] | None = None
    model: str | None = None
    prompt: Annotated[str, Meta(extra_json_schema={"minLength": 1})] | None = None
    messages: Annotated[list[Message], Meta(extra_json_schema={"minItems": 1})] | None = None
    tools: list[Tool] | UnsetType | None = UNSET
    prompt_token_ids: (
        Annotated[list[Annotated[int, Meta(ge=0, lt=2**32)]], Meta(extra_json_schema={"minItems": 1})] | None
    ) = None
    ttft_timeout_s: Annotated[float, Meta(gt=0.0)] | None = None
    timeout_s: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT_S)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    on_disconnect: OnDisconnect = "continue"
    owner: Annotated[str, Meta(max_length=128)] | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.id is not None:
            check_job_id(self.id)
        given = [name for name in PROMPTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"give exactly one of prompt, messages and prompt_token_ids, got {', '.join(given) or 'none'}",
                param=given[-1] if given else "prompt",
            )
        if not getattr(self, given[0]):
            raise InvalidRequest(f"{given[0]} is empty: there is nothing to continue", param=given[0])
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise InvalidRequest(f"{name} must be finite", param=name)
        if self.tools and self.messages is None:
            raise InvalidRequest("tools are written into messages: a prompt is whole already", param="tools")
        if self.ignore_eos and self.constraint is not None:
            raise InvalidRequest("ignore_eos does not go with response_format, which ends answers", param="ignore_eos")
        if self.metadata and len(msgspec.json.encode(self.metadata)) > MAX_METADATA_BYTES:
            raise InvalidRequest(f"metadata is limited to {MAX_METADATA_BYTES} bytes as JSON", param="metadata")


_job_decoder = msgspec.json.Decoder(Job)
_canonical = msgspec.json.Encoder(order="deterministic")


def parse_job(data: bytes) -> Job:
    """A job from the payload of a queue message.

    Raises `UnsupportedVersion` for a newer wire version, `InvalidRequest` (with `param`) for anything else.
    """
    return decode_versioned(_job_decoder, data)


def job_digest(job: Job) -> str:
    """Tells two jobs of one id apart: 32 hex digits over everything that the caller asked for.

    Who watches a job (`owner`, `on_disconnect`) does not change what it is.
    """
    asked = msgspec.to_builtins(msgspec.structs.replace(job, owner=None, on_disconnect="continue"), str_keys=True)
    return hashlib.blake2b(_canonical.encode(asked), digest_size=16, person=b"kvrelay-job").hexdigest()
