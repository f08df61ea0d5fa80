"""Which lines of a file run, in which order, and what is said of the others."""

import io
import itertools
import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.batch.lines import make_plan, parse_line, read_line

CHAT = "/v1/chat/completions"


def line(custom_id: Any, content: str = "hi") -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    request = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(request, ensure_ascii=False).encode() + b"\n"


def test_what_begins_alike_runs_together() -> None:
    made = [(group, number) for group in range(4) for number in range(5)]
    random.Random(7).shuffle(made)
    data = b"".join(line(f"{group}/{number}", f"prefix {group} " * 20 + str(number)) for group, number in made)
    file = io.BytesIO(data)
    plan = make_plan(file, CHAT)
    order = [json.loads(bytes(parse_line(read_line(file, place), CHAT).custom_id)) for place in plan.places]
    assert order == sorted(f"{group}/{number}" for group, number in made)


def test_what_shares_more_is_nearer() -> None:
    """A long beginning that all share, then one of each document, then one of each question."""
    made = [(document, number) for document in range(6) for number in range(4)]
    random.Random(7).shuffle(made)
    shared = "You answer questions about one document. " * 100
    data = b"".join(line(f"{document}/{n}", f"{shared}{f'doc {document} ' * 100}{n}") for document, n in made)
    file = io.BytesIO(data)
    order = [json.loads(read_line(file, place))["custom_id"].split("/")[0] for place in make_plan(file, CHAT).places]
    assert len(order) == 24 and num_turns(order) == 5


def num_turns(order: list[str]) -> int:
    """How often one is followed by another."""
    return sum(earlier != later for earlier, later in itertools.pairwise(order))


@given(st.lists(st.text(max_size=20), unique=True, max_size=8), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_places_lead_to_their_lines(names: list[str], end: bytes, bom: bool) -> None:
    usable = [name for name in names if name.encode("utf-8", "ignore").decode() == name]
    made = [line(name, name)[:-1] for name in usable]
    file = io.BytesIO(b"\xef\xbb\xbf" * bom + (end * 2).join(made))
    plan = make_plan(file, CHAT)
    assert not plan.bad and (bool(plan.errors) or usable)
    assert sorted(read_line(file, place) for place in plan.places) == sorted(made)
    assert [place.number for place in sorted(plan.places)] == [2 * number + 1 for number in range(len(made))]


def test_two_spellings_of_one_custom_id() -> None:
    plan = make_plan(io.BytesIO(line("é") + line("@").replace(b'"@"', rb'"\u00e9"')), CHAT)
    assert [error.line for error in plan.errors] == [2]
