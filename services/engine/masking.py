"""What the grammars of a pass allow, found out beside it where a core is free: nobody needs it before tokens are drawn.

The library lets go of the GIL while it works, as the pass does. Where the pass has all cores, its threads would wait
for the one whose core was taken: there it is found out before.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kernels.sampling import Mask
from schemas.errors import GrammarFailed
from services.text.grammar import Matcher
from services.tuned import usable_cores


class Allowed:
    """Of one choice in one pass: `masks[i]` are the tokens that may come behind the first `i` of `draft`.

    Nothing is allowed before `find`, nor where that failed: `failure` says why the next token cannot be found.
    """

    def __init__(self, matcher: Matcher, draft: Sequence[int]) -> None:
        self.masks = matcher.nothing(1 + len(draft))
        self.failure: GrammarFailed | None = None
        self._matcher = matcher
        self._draft = draft

    def mask(self, ahead: int) -> Mask:
        mask: Mask = self.masks[ahead]
        return mask

    def find(self) -> None:
        try:
            self._matcher.fill(self.masks, self._draft)
        except GrammarFailed as error:
            self.failure = error


class Masking:
    """Has a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")

    def begin(self, asked: Sequence[Allowed], then: Callable[[], None]) -> "Future[None]":
        """Finds them on the thread, and calls `then` whatever comes of it."""
        return self._thread.submit(_find, asked, then)

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def has_core_beside(threads: int) -> bool:
    """Whether a pass of so many threads leaves a core to this process."""
    return threads < len(usable_cores())


def _find(asked: Sequence[Allowed], then: Callable[[], None]) -> None:
    try:
        for allowed in asked:
            allowed.find()
    finally:
        then()
