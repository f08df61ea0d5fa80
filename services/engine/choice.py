"""One choice of a job: what its tokens have released as text so far, and how it ended.

A pure function of the token ids, so prefill, decode and whoever takes over a job make the same events from the
same ids. Knows nothing of logits or KV.
"""

from schemas.events import Event, Finish, FinishReason, Logprobs, Token
from schemas.job import Sampling
from services.engine.sampler import Sampled
from services.text.detokenizer import Detokenizer
from services.text.model import TextModel


class Choice:
    """`sampling.max_tokens` is resolved. `finished` is set by the token that ends the choice."""

    def __init__(self, text: TextModel, sampling: Sampling, number: int) -> None:
        assert sampling.max_tokens is not None
        self.number = number
        self.token_ids: list[int] = []
        self.first_logprobs: Logprobs | None = None
        self.finished = False
        self._max_tokens = sampling.max_tokens
        self._eos_ids = frozenset() if sampling.ignore_eos else frozenset(text.eos_ids)
        self._detokenizer = Detokenizer(text.tokenizer, list(sampling.stop))

    def push(self, sampled: Sampled) -> list[Event]:
        """The events of the next token: its `token`, and the `finish` if the choice ends with it."""
        index = len(self.token_ids)
        if index == 0:
            self.first_logprobs = sampled.logprobs
        self.token_ids.append(sampled.id)
        released, stop = self._detokenizer.push(sampled.id)
        token = Token(choice=self.number, index=index, id=sampled.id, text=released, logprobs=sampled.logprobs)
        if stop is not None:
            return [token, self._finish("stop", stop=stop, held="")]
        if sampled.id in self._eos_ids:
            return [token, self._finish("stop", stop=None, held=self._detokenizer.finish())]
        if len(self.token_ids) == self._max_tokens:
            return [token, self._finish("length", stop=None, held=self._detokenizer.finish())]
        return [token]

    def _finish(self, reason: FinishReason, stop: str | None, held: str) -> Finish:
        self.finished = True
        return Finish(choice=self.number, reason=reason, stop=stop, text=held, tokens=len(self.token_ids))
