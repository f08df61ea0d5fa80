"""How /generate spells an answer: as text-generation-inference does."""

from collections.abc import Sequence

from schemas.events import Token
from schemas.generate import GenerateAnswer, GenerateDetails, GeneratedToken, GenerateEvent
from schemas.openai_answers import LOWEST_LOGPROB, Usage
from services.openai.answer import Choice, Head, Metrics
from services.openai.token_names import TokenNames
from services.text.tool_format import Call


class GenerateShape:
    """Of one choice; a stream's tokens all come with logprobs, which is how they come one by one."""

    has_marker = False

    def __init__(self, head: Head, names: TokenNames, with_usage: bool) -> None:
        self._names = names

    def opening(self, choice: Choice) -> None:
        return None

    def piece(self, choice: Choice, text: str, token: Token | None, calls: Sequence[Call]) -> GenerateEvent:
        """Held-back text that comes with the end is no token's: it has the last one's id."""
        if token is None:
            return GenerateEvent(index=len(choice.tokens), token=GeneratedToken(self._last_id(choice), text, 0.0))
        top = token.logprobs.top if token.logprobs is not None else []
        alternatives = [GeneratedToken(id_, self._names.text(id_), max(p, LOWEST_LOGPROB)) for id_, p in top]
        return GenerateEvent(index=len(choice.tokens), token=_told(token), top_tokens=alternatives)

    def closing(self, choice: Choice) -> GenerateEvent:
        return GenerateEvent(
            index=len(choice.tokens),
            token=GeneratedToken(self._last_id(choice), "", 0.0, special=True),
            generated_text=choice.text,
            details=_details(choice, len(choice.tokens)),
        )

    def usage(self, usage: Usage, metrics: Metrics) -> GenerateAnswer:
        raise AssertionError("nobody can ask for it")

    def whole(self, choices: list[Choice], usage: Usage, metrics: Metrics) -> GenerateAnswer:
        (choice,) = choices
        details = _details(choice, usage.completion_tokens) if choice.tokens else None
        return GenerateAnswer(generated_text=choice.text, details=details)

    def _last_id(self, choice: Choice) -> int:
        return choice.tokens[-1].id if choice.tokens else 0


def _details(choice: Choice, num_tokens: int) -> GenerateDetails:
    stopped = "stop_sequence" if choice.stop is not None else "eos_token"
    return GenerateDetails(
        finish_reason="length" if choice.reason == "length" else stopped,  # type: ignore[arg-type]
        generated_tokens=num_tokens,
        tokens=[_told(token) for token in choice.tokens],
    )


def _told(token: Token) -> GeneratedToken:
    logprob = token.logprobs.logprob if token.logprobs is not None else 0.0
    return GeneratedToken(token.id, token.text, max(logprob, LOWEST_LOGPROB))
