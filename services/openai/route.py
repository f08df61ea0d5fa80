"""What differs between the routes that generate, and how an answer is spelled again from what its jobs keep of it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from schemas.asked import Asked, RouteName
from schemas.generate import parse_generate
from schemas.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from services.openai.answer import Answer, Head, Shape
from services.openai.chat_shape import ChatShape
from services.openai.completion_shape import CompletionShape
from services.openai.generate_shape import GenerateShape
from services.openai.position import Position
from services.openai.token_names import TokenNames


class Route(NamedTuple):
    name: RouteName
    parse: Callable[..., ChatRequest | CompletionRequest]
    shape: Callable[[Head, TokenNames, bool], Shape]
    id_prefix: str


CHAT = Route("chat", parse_chat, ChatShape, "chatcmpl-")
COMPLETIONS = Route("completions", parse_completion, CompletionShape, "cmpl-")
GENERATE = Route("generate", parse_generate, GenerateShape, "req-")
GENERATE_STREAM = GENERATE._replace(parse=partial(parse_generate, stream=True))
ROUTES: dict[str, Route] = {route.name: route for route in (CHAT, COMPLETIONS, GENERATE)}


def answer_to(asked: Asked, model: str, names: TokenNames, last_event_id: str = "") -> Answer:
    """An answer that has heard nothing yet, for a reader who has got everything up to `last_event_id`.

    Raises `InvalidRequest` for an id that no event of this answer can have.
    """
    route = ROUTES[asked.route]
    head = Head(id=route.id_prefix + asked.key, model=model, created=asked.created)
    shape = route.shape(head, names, asked.include_usage)
    seen = Position.parse(last_event_id, asked.num_prompts * asked.n) if last_event_id else None
    return Answer(
        head,
        shape,
        asked.num_prompts,
        asked.n,
        asked.logprobs,
        asked.include_usage,
        seen,
        with_metrics=asked.include_metrics,
        with_tools=asked.tools,
    )
