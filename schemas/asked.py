"""What a job's first event keeps of the HTTP request behind it: enough for any gateway to spell the answer again."""

from typing import Literal

import msgspec

RouteName = Literal["chat", "completions", "generate"]


class Asked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`key`: what the answer and its jobs are named after. `created`: unix seconds. `digest`: of the job, to tell a
    retry from another request under the same Idempotency-Key. `echo`: text that the answer begins with. `tools`: calls
    are read from its text. `detached`: the job goes on whether or not anybody watches it. Durations are the job's own,
    from its acceptance.
    """

    key: str
    route: RouteName
    created: int
    digest: str = ""
    num_prompts: int = 1
    n: int = 1
    logprobs: bool = False
    include_usage: bool = False
    include_metrics: bool = False
    tools: bool = False
    echo: str = ""
    detached: bool = False
    timeout_s: float | None = None
    ttft_timeout_s: float | None = None
