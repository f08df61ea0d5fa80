"""A job's choices and what is already on its reply subject: tokens in, each event out exactly once.

Tokens of earlier deliveries are pushed again to rebuild held-back text; only what is not published yet is.
"""

from collections.abc import Callable

from schemas.errors import InvalidRequest
from schemas.events import Done, Event, Finish, Token, Usage
from schemas.job import Sampling
from services.engine.choice import Choice
from services.engine.sampler import Sampled
from services.text.model import TextModel
from services.worker.history import History


class JobStream:
    def __init__(self, put: Callable[..., None], text: TextModel, sampling: Sampling, history: History) -> None:
        """`put(*events)` publishes; `history` is what earlier deliveries published."""
        self._put = put
        self._history = history
        self._vocab_size = text.vocab_size
        self.choices = [Choice(text, sampling, number) for number in range(sampling.n)]

    def replay(self, first: list[tuple[int, Sampled]]) -> None:
        """Pushes the tokens that are known: those on the reply subject, or the hand-off's where it has none.

        Raises `InvalidRequest` if what is on the reply subject cannot be this job's: somebody else wrote or removed
        some of it, and going on behind a hole would make wrong text.
        """
        for choice in self.choices:
            for token in self._history.tokens.get(choice.number, []):
                expected = len(choice.token_ids)
                if choice.finished or token.index != expected or not 0 <= token.id < self._vocab_size:
                    raise InvalidRequest(
                        f"the reply subject has token {token.index} (id {token.id}) of choice {choice.number} where "
                        f"token {expected} should be: send the job again under another id"
                    )
                self.push(choice, Sampled(token.id, token.logprobs))
        for number, sampled in first:
            if not self.choices[number].token_ids:
                self.push(self.choices[number], sampled)

    def push(self, choice: Choice, sampled: Sampled) -> None:
        events = [event for event in choice.push(sampled) if not self._is_published(event)]
        if events:
            self._put(*events)

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def end(self, num_prompt: int, num_cached: int, timings: dict[str, float]) -> None:
        """Publishes `done`."""
        usage = Usage(
            prompt_tokens=num_prompt,
            completion_tokens=sum(len(choice.token_ids) for choice in self.choices),
            cached_tokens=num_cached,
        )
        self._put(Done(usage=usage, timings={name: round(value, 6) for name, value in timings.items()}))

    def _is_published(self, event: Event) -> bool:
        if isinstance(event, Token):
            return event.index < len(self._history.tokens.get(event.choice, []))
        return isinstance(event, Finish) and event.choice in self._history.finished
