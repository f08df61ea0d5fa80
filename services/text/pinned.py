"""What a pinned text is in tokens: those that every prompt which begins with it begins with."""

from typing import Literal

from schemas.errors import InvalidRequest
from schemas.job import Job, Message
from services.text.model import TextModel
from services.text.prompt import resolve_prompt

_USERS = ("A", "?")  # two beginnings of what may follow that have nothing in common


def pinned_ids(kind: Literal["system", "prompt"], text: str, model: TextModel) -> list[int]:
    """`system`: the rendered turn of a system message; `prompt`: the beginning of raw prompts.

    Tokens at the seam may come out otherwise once a text goes on ("ti" + "me"): whoever compares, compares ids.
    Raises `InvalidRequest` and `ContextLengthExceeded`, as `resolve_prompt`.
    """
    if kind == "prompt":
        return resolve_prompt(Job(prompt=text), model)
    return _system_turn(Message(role="system", content=text), model)


def _system_turn(message: Message, model: TextModel) -> list[int]:
    """The turn alone where the template renders it alone; else what chats with this system message have in common."""
    first, second = (
        resolve_prompt(Job(messages=[message, Message(role="user", content=user)]), model) for user in _USERS
    )
    common = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))
    assert model.template is not None  # else the prompts were refused
    try:
        turn = model.template.render_ids([message], model.tokenizer, add_generation_prompt=False)
    except InvalidRequest:
        return first[:common]
    return turn if turn == first[: min(len(turn), common)] else first[:common]
