"""Event streams for tests."""

from schemas.events import Done, Event, Finish, Start, Token, Usage

START = Start(job="j", origin="1-1", digest="d", build="b", seed=1, prompt_tokens=3, cached_tokens=0)


def token(index: int, choice: int = 0) -> Token:
    return Token(choice=choice, index=index, id=index, text=f"t{index} ")


def ending(num_tokens: int) -> list[Event]:
    return [
        Finish(choice=0, reason="length", tokens=num_tokens),
        Done(usage=Usage(prompt_tokens=3, completion_tokens=num_tokens)),
    ]


def whole(num_tokens: int) -> list[Event]:
    """A complete stream of one choice."""
    return [START, *map(token, range(num_tokens)), *ending(num_tokens)]
