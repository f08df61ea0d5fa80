"""`/generate` as clients of text-generation-inference know it: a thin alias of /v1/completions for one raw prompt."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from schemas.job import MAX_TOP_LOGPROBS
from schemas.json_object import read_object
from schemas.openai import CompletionRequest, Stop, TokenCount, unsupported
from schemas.wire import translate

DEFAULT_NEW_TOKENS = 100
MAX_STOPS = 4
TGI_TYPES = {422: "validation", 429: "overloaded"}
# Known parameters that nothing here acts on, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "best_of": (1,),
    "truncate": (),
    "watermark": (False,),
    "decoder_input_details": (False,),
    "grammar": (),
    "adapter_id": (),
}


class GenerateParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling is greedy unless `do_sample` or one of `temperature`, `top_k` and `top_p` is given."""

    max_new_tokens: TokenCount | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Meta(gt=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    return_full_text: bool | None = None
    details: bool | None = None
    top_n_tokens: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def samples(self) -> bool:
        given = (self.temperature, self.top_k, self.top_p)
        return bool(self.do_sample) or any(value is not None for value in given)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    inputs: Annotated[str, Meta(min_length=1)]
    parameters: GenerateParameters | None = None


class _Completion(CompletionRequest, frozen=True, kw_only=True):
    """Of the one model that is served; here the prompt may be repeated beside the tokens."""

    model: str = ""

    def __post_init__(self) -> None:
        pass


class GeneratedToken(msgspec.Struct, frozen=True):
    """`special`: of an event that ends a stream and is no token."""

    id: int
    text: str
    logprob: float
    special: bool = False


class GenerateDetails(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None = None
    prefill: list[Any] = []
    tokens: list[GeneratedToken] = []


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    generated_text: str
    details: GenerateDetails | None = None


class GenerateEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`index` counts from 1; the last event has the text and the details, and no token of its own."""

    index: int
    token: GeneratedToken
    top_tokens: list[GeneratedToken] = []
    generated_text: str | None = None
    details: GenerateDetails | None = None


class GenerateError(msgspec.Struct, frozen=True):
    error: str
    error_type: str


_decoder = msgspec.json.Decoder(GenerateRequest)


def parse_generate(data: bytes, *, strict: bool = False, stream: bool = False) -> CompletionRequest:
    """Raises `InvalidRequest`, naming the field."""
    fields = read_object(data).get("parameters")
    for name, harmless in _UNSUPPORTED.items():
        value = fields.get(name) if isinstance(fields, dict) else None
        if value is not None and value not in harmless:
            raise unsupported(f"parameters.{name}")
    asked = translate(_decoder, data)
    found = asked.parameters or GenerateParameters()
    tells_tokens = stream or found.details or found.top_n_tokens
    return _Completion(
        prompt=asked.inputs,
        stream=stream,
        echo=found.return_full_text,
        max_tokens=found.max_new_tokens or DEFAULT_NEW_TOKENS,
        temperature=(found.temperature or 1.0) if found.samples else 0.0,
        top_p=found.top_p,
        top_k=found.top_k,
        repetition_penalty=found.repetition_penalty,
        frequency_penalty=found.frequency_penalty,
        seed=found.seed,
        stop=found.stop,
        logprobs=(found.top_n_tokens or 0) if tells_tokens else None,
    )
