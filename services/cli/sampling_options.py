"""The options of a job on the command line: all of `schemas.job.Job` that a person would set."""

import functools
import secrets
from collections.abc import Callable
from typing import Any

import click

from schemas import wire
from schemas.errors import InvalidRequest
from schemas.job import Job, parse_job
from schemas.subjects import Lane

_NUMBERS: list[tuple[str, type, str]] = [
    ("max_tokens", int, "most tokens of an answer; default: as many as the context holds"),
    ("temperature", float, "0 takes the likeliest token each time (greedy)"),
    ("top_p", float, "keep the likeliest tokens that make up this probability"),
    ("top_k", int, "keep so many of the likeliest tokens; 0: all"),
    ("min_p", float, "drop tokens below this part of the likeliest one's probability"),
    ("seed", int, "of the random numbers; default: derived from the job's id"),
    ("n", int, "how many answers"),
    ("logprobs", int, "tell each token's log probability, and so many alternatives (with --json)"),
    ("presence_penalty", float, "-2 to 2: against tokens that occurred"),
    ("frequency_penalty", float, "-2 to 2: against tokens, as often as they occurred"),
    ("repetition_penalty", float, "above 0: divides the logits of tokens that occurred"),
    ("timeout_s", float, "end the job with an error after so many seconds"),
    ("ttft_timeout_s", float, "the same, for its first token"),
]
_DEFAULTS = {"temperature": 0.0}


def with_sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the command `sampling`, for `make_job`, and `lane`."""

    @functools.wraps(command)
    def run(lane: str, stop: tuple[str, ...], logit_bias: tuple[str, ...], ignore_eos: bool, **arguments: Any) -> Any:
        names = [*(name for name, _, _ in _NUMBERS), "id", "cache_salt"]
        sampling = {name: value for name in names if (value := arguments.pop(name)) is not None}
        sampling |= {"stop": list(stop), "ignore_eos": ignore_eos, "logit_bias": dict(map(_bias, logit_bias))}
        return command(sampling=sampling, lane=Lane(lane), **arguments)

    run = click.option("--cache-salt", metavar="TEXT", help="share cached blocks only with jobs of the same salt")(run)
    run = click.option("--id", metavar="ID", help="the job's id  [default: a random one]")(run)
    lanes = click.Choice([str(lane) for lane in Lane])
    run = click.option("--lane", type=lanes, default=str(Lane.INTERACTIVE), show_default=True)(run)
    run = click.option("--ignore-eos", is_flag=True, help="go on past the model's own end")(run)
    run = click.option("--logit-bias", multiple=True, metavar="ID=N", help="-100 to 100, added to a token's logit")(run)
    run = click.option("--stop", multiple=True, metavar="TEXT", help="end before this text; may be repeated")(run)
    for name, kind, text in reversed(_NUMBERS):
        flag, default = "--" + name.replace("_", "-"), _DEFAULTS.get(name)
        run = click.option(flag, name, type=kind, default=default, show_default=default is not None, help=text)(run)
    return run


def make_job(sampling: dict[str, Any], **prompt: Any) -> Job:
    """The job, with an id. `prompt` is `prompt=` or `messages=`. Raises `InvalidRequest` that names the field."""
    fields = {"id": secrets.token_hex(8), **sampling, **prompt}
    path = wire.find_lone_surrogate(fields)
    if path is not None:
        raise InvalidRequest(f"{path} is not UTF-8 text", param=path)
    return parse_job(wire.encode(fields))


def _bias(text: str) -> tuple[str, float]:
    token, _, value = text.partition("=")
    try:
        return str(int(token)), float(value)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not TOKEN_ID=NUMBER", param_hint="--logit-bias") from None
