"""How /v1/chat/completions spells an answer."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from schemas.events import Token
from schemas.openai_answers import (
    LOWEST_LOGPROB,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    Delta,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from services.openai.answer import Choice, Head, Metrics
from services.openai.token_names import TokenNames
from services.text.tool_format import Call


class ChatShape:
    has_marker = True

    def __init__(self, head: Head, names: TokenNames, with_usage: bool) -> None:
        self._head = head
        self._names = names
        self._no_usage: UnsetType | None = None if with_usage else UNSET

    def opening(self, choice: Choice) -> ChatChunk:
        return self._chunk([ChatChunkChoice(choice.index, Delta(role="assistant", content=""))], self._no_usage)

    def piece(self, choice: Choice, text: str, token: Token | None, calls: Sequence[Call]) -> ChatChunk:
        logprobs = self._logprobs([token]) if token is not None else None
        first = len(choice.calls) - len(calls)
        called = [self._call(choice, first + n, call, index=first + n) for n, call in enumerate(calls)]
        delta = Delta(content=text if text or not called else None, tool_calls=called or UNSET)
        return self._chunk([ChatChunkChoice(choice.index, delta, logprobs)], self._no_usage)

    def closing(self, choice: Choice) -> ChatChunk:
        return self._chunk([ChatChunkChoice(choice.index, Delta(), None, choice.reason, choice.stop)], self._no_usage)

    def usage(self, usage: Usage, metrics: Metrics) -> ChatChunk:
        return self._chunk([], usage, metrics)

    def whole(self, choices: list[Choice], usage: Usage, metrics: Metrics) -> ChatAnswer:
        head = self._head
        return ChatAnswer(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.build,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=usage,
            metrics=metrics,
        )

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, metrics: Metrics = UNSET
    ) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.build,
            choices=choices,
            usage=usage,
            metrics=metrics,
        )

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        logprobs = self._logprobs(choice.tokens) if choice.tokens else None
        calls = [self._call(choice, n, call) for n, call in enumerate(choice.calls)]
        message = ChatMessage(choice.text or (None if calls else ""), tool_calls=calls or UNSET)
        return ChatChoice(choice.index, message, logprobs, choice.reason, choice.stop)

    def _call(self, choice: Choice, number: int, call: Call, index: int | UnsetType = UNSET) -> ToolCall:
        """Its id is the same for whoever spells the answer again."""
        key = self._head.id.rpartition("-")[2]
        return ToolCall(f"call_{key}_{choice.index}_{number}", CalledFunction(call.name, call.arguments), index=index)

    def _logprobs(self, tokens: list[Token]) -> ChatLogprobs:
        return ChatLogprobs([self._token(token) for token in tokens])

    def _token(self, token: Token) -> TokenLogprob:
        """A token that came without logprobs was not asked for any: `Answer` never passes one."""
        assert token.logprobs is not None
        top = [TopLogprob(*self._spelled(id_, logprob)) for id_, logprob in token.logprobs.top]
        return TokenLogprob(*self._spelled(token.id, token.logprobs.logprob), top)

    def _spelled(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return self._names.text(token_id), max(logprob, LOWEST_LOGPROB), list(self._names.raw(token_id))
