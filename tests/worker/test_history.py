"""What a reply subject tells the next delivery: known tokens, who wrote last, and who must run alone."""

from typing import NamedTuple

from schemas.events import Done, Error, Event, Finish, Retry, Start, Token, Usage
from schemas.subjects import Stage
from services.worker.history import History


class Message(NamedTuple):
    sequence: int
    claim: str
    events: list[Event]
    worker: str = "w"


START = Start(job="j", origin="1-1", digest="d", build="b", seed=1, prompt_tokens=3, cached_tokens=2)


def token(choice: int, index: int) -> Token:
    return Token(choice=choice, index=index, id=index, text="x")


def test_tokens_finishes_and_the_end_are_collected():
    history = History.of(
        [
            Message(5, "prefill.0.1", [START, token(0, 0), token(1, 0)]),
            Message(9, "decode.1.1", [token(1, 1), Finish(choice=1, reason="stop", tokens=2)]),
            Message(11, "decode.1.1", [Done(usage=Usage(prompt_tokens=3, completion_tokens=3))]),
        ]
    )
    assert history.last == 11 and history.start == START
    assert [t.index for t in history.tokens[1]] == [0, 1] and len(history.tokens[0]) == 1
    assert set(history.finished) == {1}
    assert isinstance(history.end, Done)


def test_an_error_is_an_end():
    history = History.of([Message(1, "", [Error(code="cancelled", message="m")])])
    assert isinstance(history.end, Error)


def test_deliveries_that_made_nothing_are_counted():
    assert History.of([]).num_fruitless(Stage.PREFILL, 0, 1) == 0
    assert History.of([]).num_fruitless(Stage.PREFILL, 0, 3) == 2
    history = History.of([Message(1, "prefill.0.2", [START])])
    assert history.num_fruitless(Stage.PREFILL, 0, 3) == 0
    assert history.num_fruitless(Stage.PREFILL, 0, 4) == 1
    assert history.num_fruitless(Stage.DECODE, 1, 1) == 0, "another message counts its own deliveries"
    assert history.num_fruitless(Stage.DECODE, 1, 2) == 1


def test_only_lone_runs_since_the_last_event_condemn():
    runs = [Message(1, "decode.1.1", [token(0, 0)])]
    runs += [Message(n, f"decode.1.{n}", [Retry(attempt=n - 1)]) for n in (2, 3)]
    history = History.of(runs)
    assert history.num_lone_runs == 2
    assert history.num_fruitless(Stage.DECODE, 1, 4) == 2, "a retry is no progress"
    history = History.of([*runs, Message(4, "decode.1.3", [token(0, 1)])])
    assert history.num_lone_runs == 0 and history.num_fruitless(Stage.DECODE, 1, 4) == 0


def test_the_last_run_alone_says_how_many_count() -> None:
    runs = [Message(n, f"decode.1.{n}", [Retry(attempt=n - 1)], f"w{n}") for n in (2, 3)]
    history = History.of(runs)
    assert (history.num_lone_runs, history.lone_claim, history.lone_worker) == (2, "decode.1.3", "w3")
    assert History.of([*runs, Message(4, "decode.1.3", [Retry(attempt=1)], "w3")]).num_lone_runs == 1
