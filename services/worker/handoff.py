"""Reads the hand-off in a queue message. What passes cannot bring the model down: a pass with a token id that the
model does not have would end the worker, and with it all its other jobs."""

from schemas.errors import InvalidRequest
from schemas.handoff import Handoff, parse_handoff
from services.text.model import TextModel


def read_handoff(data: bytes, text: TextModel) -> Handoff:
    """Raises `UnsupportedVersion` or `InvalidRequest`."""
    handoff = parse_handoff(data)
    sampling = handoff.sampling
    assert sampling.max_tokens is not None
    _check_ids(handoff.prompt_token_ids, text, "prompt_token_ids")
    _check_ids([first.id for first in handoff.first], text, "first")
    _check_ids(list(sampling.logit_bias), text, "logit_bias")
    num_tokens = len(handoff.prompt_token_ids) + sampling.max_tokens
    if num_tokens > text.context_tokens:
        raise InvalidRequest(
            f"a hand-off of {num_tokens} tokens, this model's context is {text.context_tokens} tokens",
            param="sampling",
        )
    return handoff


def _check_ids(ids: list[int], text: TextModel, param: str) -> None:
    outside = next((id_ for id_ in ids if not 0 <= id_ < text.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"{param} has token {outside}, the vocabulary ends at {text.vocab_size - 1}", param=param)
