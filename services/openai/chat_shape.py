"""How /v1/chat/completions spells an answer."""

from msgspec import UNSET, UnsetType

from schemas.events import Token
from schemas.openai_answers import (
    LOWEST_LOGPROB,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from services.openai.answer import Choice, Head
from services.openai.token_names import TokenNames


class ChatShape:
    has_marker = True

    def __init__(self, head: Head, names: TokenNames, with_usage: bool) -> None:
        self._head = head
        self._names = names
        self._no_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, choice: Choice) -> ChatChunk:
        return self._chunk([ChatChunkChoice(choice.index, Delta(role="assistant", content=""))], self._no_usage)

    def piece(self, choice: Choice, text: str, token: Token | None) -> ChatChunk:
        logprobs = self._logprobs([token]) if token is not None else None
        return self._chunk([ChatChunkChoice(choice.index, Delta(content=text), logprobs)], self._no_usage)

    def closing(self, choice: Choice) -> ChatChunk:
        return self._chunk([ChatChunkChoice(choice.index, Delta(), None, choice.reason, choice.stop)], self._no_usage)

    def usage(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def whole(self, choices: list[Choice], usage: Usage) -> ChatAnswer:
        head = self._head
        return ChatAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.build,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.build,
            choices=choices,
            usage=usage,
        )

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        logprobs = self._logprobs(choice.tokens) if choice.tokens else None
        return ChatChoice(choice.index, ChatMessage(choice.text), logprobs, choice.reason, choice.stop)

    def _logprobs(self, tokens: list[Token]) -> ChatLogprobs:
        return ChatLogprobs([self._token(token) for token in tokens])

    def _token(self, token: Token) -> TokenLogprob:
        """A token that came without logprobs was not asked for any: `Answer` never passes one."""
        assert token.logprobs is not None
        top = [TopLogprob(*self._spelled(id_, logprob)) for id_, logprob in token.logprobs.top]
        return TokenLogprob(*self._spelled(token.id, token.logprobs.logprob), top)

    def _spelled(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return self._names.text(token_id), max(logprob, LOWEST_LOGPROB), list(self._names.raw(token_id))
