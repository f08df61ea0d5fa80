"""Is this the event that a reader should see next? Repeats are skipped, a gap is never silently joined."""

from schemas.errors import Internal
from schemas.events import Event, Finish, Retry, Token, is_end


class Gap(Internal):
    """Events are missing before the one at hand."""


class EventOrder:
    """Follows one job's events: every token index of a choice once, in order, then its finish, then one end."""

    def __init__(self) -> None:
        self.ended = False
        self._num_tokens: dict[int, int] = {}  # by choice
        self._finished: set[int] = set()
        self._once: set[type[Event]] = set()
        self._retries = 0

    def accept(self, event: Event) -> bool:
        """True if `event` comes next, False if it was seen before. Raises `Gap` if something is missing before it."""
        if self.ended:
            return False
        if type(event) is Token:
            return self._accept_token(event)
        if isinstance(event, Finish):
            return self._accept_finish(event)
        if isinstance(event, Retry):
            new, self._retries = event.attempt > self._retries, max(event.attempt, self._retries)
            return new
        if is_end(event):
            self.ended = True
            return True
        new = type(event) not in self._once
        self._once.add(type(event))
        return new

    def _accept_token(self, token: Token) -> bool:
        expected = self._num_tokens.get(token.choice, 0)
        if token.index > expected:
            raise Gap(f"choice {token.choice}: token {token.index} came where {expected} was expected")
        if token.index < expected:
            return False
        self._num_tokens[token.choice] = expected + 1
        return True

    def _accept_finish(self, finish: Finish) -> bool:
        if finish.choice in self._finished:
            return False
        seen = self._num_tokens.get(finish.choice, 0)
        if finish.tokens > seen:
            raise Gap(f"choice {finish.choice}: finished after {finish.tokens} tokens, {seen} were seen")
        self._finished.add(finish.choice)
        return True
