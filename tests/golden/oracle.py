"""The general oracle: one process, the whole prompt in one pass, no cache, no batch, no queue, no store."""

from schemas.job import Sampling
from services.engine.engine import Engine, Work
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.sampler import Sampler

BLOCK_TOKENS = 128  # another than the tests' pipelines use: the size must not matter


def generate(model: Model, prompt: list[int], sampling: Sampling, stop_ids: tuple[int, ...] = ()) -> list[list[int]]:
    """The token ids of each choice; `sampling.seed` and `max_tokens` are set."""
    assert sampling.seed is not None and sampling.max_tokens is not None
    num_pages = -(-(len(prompt) + sampling.max_tokens) // BLOCK_TOKENS)
    pool = PagePool(num_pages, model.page_form(BLOCK_TOKENS), max_idle=0)
    engine = Engine(model, pool)
    pages = list(range(num_pages))
    try:
        return [_generate(engine, pages, prompt, sampling, choice, stop_ids) for choice in range(sampling.n)]
    finally:
        engine.close()


def _generate(
    engine: Engine, pages: list[int], prompt: list[int], sampling: Sampling, choice: int, stop_ids: tuple[int, ...]
) -> list[int]:
    assert sampling.seed is not None and sampling.max_tokens is not None
    sampler = Sampler(sampling, sampling.seed, choice, prompt)
    tokens: list[int] = []
    rows, start = prompt, 0
    while True:
        used = pages[: -(-(start + len(rows)) // BLOCK_TOKENS)]
        (outcome,) = engine.run_now([Work(rows, start, used, [sampler], len(tokens))])
        assert isinstance(outcome, list)
        tokens.append(outcome[0].id)
        sampler.note(tokens[-1])
        if len(tokens) == sampling.max_tokens or tokens[-1] in stop_ids:
            return tokens
        start += len(rows)
        rows = [tokens[-1]]
