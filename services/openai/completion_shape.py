"""How /v1/completions spells an answer."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from schemas.events import Token
from schemas.openai_answers import LOWEST_LOGPROB, CompletionAnswer, CompletionChoice, CompletionLogprobs, Usage
from services.openai.answer import Choice, Head, Metrics
from services.openai.token_names import TokenNames
from services.text.tool_format import Call


class CompletionShape:
    has_marker = True

    def __init__(self, head: Head, names: TokenNames, with_usage: bool) -> None:
        self._head = head
        self._names = names
        self._no_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, choice: Choice) -> CompletionAnswer | None:
        """The prompt, where it is to be echoed."""
        return self._answer([CompletionChoice(choice.index, choice.text)], self._no_usage) if choice.parts else None

    def piece(self, choice: Choice, text: str, token: Token | None, calls: Sequence[Call]) -> CompletionAnswer:
        logprobs = self._logprobs([token], [choice.length]) if token is not None else None
        return self._answer([CompletionChoice(choice.index, text, logprobs)], self._no_usage)

    def closing(self, choice: Choice) -> CompletionAnswer:
        return self._answer([CompletionChoice(choice.index, "", None, choice.reason, choice.stop)], self._no_usage)

    def usage(self, usage: Usage, metrics: Metrics) -> CompletionAnswer:
        return self._answer([], usage, metrics)

    def whole(self, choices: list[Choice], usage: Usage, metrics: Metrics) -> CompletionAnswer:
        return self._answer([self._whole_choice(choice) for choice in choices], usage, metrics)

    def _answer(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None, metrics: Metrics = UNSET
    ) -> CompletionAnswer:
        head = self._head
        return CompletionAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.build,
            choices=choices,
            usage=usage,
            metrics=metrics,
        )

    def _whole_choice(self, choice: Choice) -> CompletionChoice:
        logprobs = None
        if choice.tokens:
            offsets = [0]
            for token in choice.tokens:
                offsets.append(offsets[-1] + len(token.text))
            logprobs = self._logprobs(choice.tokens, offsets[:-1])
        return CompletionChoice(choice.index, choice.text, logprobs, choice.reason, choice.stop)

    def _logprobs(self, tokens: list[Token], offsets: list[int]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[self._names.key(token.id) for token in tokens],
            token_logprobs=[self._own(token) for token in tokens],
            top_logprobs=[self._top(token) for token in tokens],
            text_offset=offsets,
        )

    def _own(self, token: Token) -> float:
        assert token.logprobs is not None
        return max(token.logprobs.logprob, LOWEST_LOGPROB)

    def _top(self, token: Token) -> dict[str, float]:
        """The alternatives asked for, and the token itself: up to one more than asked, as OpenAI does."""
        assert token.logprobs is not None
        top = {self._names.key(id_): max(logprob, LOWEST_LOGPROB) for id_, logprob in token.logprobs.top}
        return {**top, self._names.key(token.id): self._own(token)}
