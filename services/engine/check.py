"""Does this process compute what it should? Asked before it takes work, and again while it works.

Three questions. Exactness: are the logits of a row the same bits whether its prompt was computed with others or alone,
at once or in chunks, in a prefill or a decode step? Sameness: are a fast implementation's K, V and logits those of
the plain one of the same arithmetic? Truth: are they the logits that `transformers` computes in float32?
Only a model with a golden can be asked the last, and it answers without its quantisation: that is meant to change
logits, by 0.9 (int8) and 11 (int4), which would hide a fault of the weights or of the machine.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kernels.arithmetic import Arithmetic
from kernels.torch_arithmetic import TorchArithmetic
from schemas.errors import SetupError
from services.engine.golden import Golden, GoldenPrompt, load_golden
from services.engine.model import Model, Span
from services.engine.reference_model import ReferenceModel
from services.models.files import ModelFiles

log = logging.getLogger(__name__)

NUM_STEPS = 10
NUM_COMPARED = 16
"""Rows that are also computed plainly: about three seconds for the default model."""
PAGE_TOKENS = 64
BOUNDS = {
    (torch.float32, torch.float32): 1e-3,
    (torch.bfloat16, torch.float32): 0.5,
    (torch.bfloat16, torch.bfloat16): 1.5,
}
"""Most that a logit may differ from the golden, by the dtype of weights, K and V and by that of the products: measured
6e-5, 0.27 and 1.08, see decision 0002."""
INT8_BOUND = 2.0
"""The same of int8, weights in 4 bits compared with themselves: see decision 0036."""


class Canary:
    """One fixed prompt whose logits must stay the bits that they were at start. Costs one short prefill."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        self._model = model
        self._ids = list(ids)
        self._pool = model.new_pool(_num_pages(len(self._ids)), PAGE_TOKENS)
        self._expected = self._logits()

    @property
    def digest(self) -> str:
        """Of the bits that its logits had at start, in hex."""
        return hashlib.blake2b(self._expected.contiguous().numpy().tobytes(), digest_size=16).hexdigest()

    def sings(self) -> bool:
        """False: memory, a library or the machine has changed under us; nothing computed here may be trusted."""
        return torch.equal(self._logits(), self._expected)

    def _logits(self) -> Tensor:
        rows = len(self._ids)
        return self._model.forward(self._ids, [Span(0, rows, range(_num_pages(rows)))], self._pool, [rows - 1])


def canary_of(model: Model, files: ModelFiles) -> Canary:
    """The one that `self_check` returns, without the check."""
    return Canary(model, _prompts(model, load_golden(files.fingerprint))[0].ids)


def self_check(model: Model, files: ModelFiles) -> Canary:
    """Raises `SetupError` saying what failed. Takes about a second for the default model on one core."""
    started = time.monotonic()
    golden = load_golden(files.fingerprint)
    prompts = _prompts(model, golden)
    if not isinstance(model, ReferenceModel):
        _compare_with_plain(model, files, prompts[0])
    elif model.arithmetic.takes_blocks:
        prompts = prompts[:1]  # exact by its definition, and a hundred times slower
    logits = _decode(model, prompts)
    for prompt, stepped in zip(prompts, logits, strict=True):
        if not torch.equal(stepped, _prefill_in_chunks(model, prompt)):
            raise SetupError(
                f"self-check: with {model.arithmetic.name} a row's logits depend on how its prompt was computed; "
                "tell the maintainers this machine's CPU and torch version, and try --dtype float32"
            )
    if golden and model.arithmetic.quantisation != "none":
        logits = _decode(model.with_arithmetic(model.arithmetic.unquantised()), prompts)
    worst = max(_compare(model.arithmetic, prompt, rows) for prompt, rows in zip(prompts, logits, strict=True))
    truth = f"logits within {worst:.1e} of the golden" if golden else "no golden for this model: exactness only"
    log.info("self-check passed in %.1f s: %s, %s", time.monotonic() - started, model.arithmetic.name, truth)
    return Canary(model, prompts[0].ids)


def _compare_with_plain(model: Model, files: ModelFiles, prompt: GoldenPrompt) -> None:
    """Every weight is multiplied by an activation of each row, which is 0 in few of them; whatever differs in one
    product is in all logits of its row."""
    ids, pages = prompt.ids[:NUM_COMPARED], range(_num_pages(NUM_COMPARED))
    found = []
    for computing in (model, ReferenceModel(files, model.arithmetic)):
        pool = computing.new_pool(len(pages), PAGE_TOKENS)
        prompt_logits = computing.forward(ids[:-1], [Span(0, len(ids) - 1, pages)], pool, None)
        logits = torch.cat([prompt_logits, computing.forward(ids[-1:], [Span(len(ids) - 1, 1, pages)], pool, None)])
        found.append((logits.view(torch.int32), pool.view(torch.uint8)))
    if not all(torch.equal(fast, plain) for fast, plain in zip(*found, strict=True)):
        raise SetupError(
            f"self-check: the native step of {model.arithmetic.name} does not compute what its definition says; "
            "tell the maintainers this machine's CPU"
        )


def logit_bound(arithmetic: Arithmetic) -> float:
    if isinstance(arithmetic, TorchArithmetic):
        return BOUNDS[arithmetic.dtype, arithmetic.layer_recipe.dtype]
    return INT8_BOUND


def _decode(model: Model, prompts: Sequence[GoldenPrompt]) -> list[Tensor]:
    """The prompts prefilled in one pass, then decoded as one batch that is fed their known tokens: the logits
    `[NUM_STEPS, V]` of each."""
    num_pages = [_num_pages(len(prompt.ids) + NUM_STEPS) for prompt in prompts]
    pages = [range(end - num, end) for num, end in zip(num_pages, accumulate(num_pages), strict=True)]
    pool = model.new_pool(sum(num_pages), PAGE_TOKENS)
    spans = [Span(0, len(prompt.ids), own) for prompt, own in zip(prompts, pages, strict=True)]
    last_rows = [end - 1 for end in accumulate(span.rows for span in spans)]
    steps = [model.forward([token for prompt in prompts for token in prompt.ids], spans, pool, last_rows)]
    for step in range(NUM_STEPS - 1):
        spans = [Span(len(prompt.ids) + step, 1, own) for prompt, own in zip(prompts, pages, strict=True)]
        steps.append(model.forward([prompt.tokens[step] for prompt in prompts], spans, pool, range(len(prompts))))
    return list(torch.stack(steps, dim=1))


def _prefill_in_chunks(model: Model, prompt: GoldenPrompt) -> Tensor:
    """The same rows of one prompt alone, in two chunks, over pages of another size in another order."""
    ids = [*prompt.ids, *prompt.tokens[: NUM_STEPS - 1]]
    pages = list(reversed(range(-(-len(ids) // 16))))
    pool = model.new_pool(len(pages), 16)
    cut = len(prompt.ids) // 2
    model.forward(ids[:cut], [Span(0, cut, pages)], pool, [])
    rows = range(len(prompt.ids) - 1 - cut, len(ids) - cut)
    return model.forward(ids[cut:], [Span(cut, len(ids) - cut, pages)], pool, rows)


def _compare(arithmetic: Arithmetic, prompt: GoldenPrompt, logits: Tensor) -> float:
    """The largest difference from the golden; 0 where there is none. Raises `SetupError` beyond the bound."""
    worst = 0.0
    for step, (kept, values) in enumerate(zip(prompt.logit_ids, prompt.logits, strict=True)):
        worst = max(worst, float((logits[step, kept] - torch.tensor(values)).abs().max()))
    bound = logit_bound(arithmetic)
    if not worst <= bound:
        raise SetupError(
            f"self-check: logits differ by {worst:.2g} from what transformers computes, allowed are {bound} with "
            f"{arithmetic.name}; remove the model from the data folder to have it converted again"
        )
    return worst


def _prompts(model: Model, golden: Golden | None) -> list[GoldenPrompt]:
    return golden.prompts if golden else _made_up_prompts(model)


def _made_up_prompts(model: Model) -> list[GoldenPrompt]:
    """Token ids from all over the vocabulary, for a model that nobody has made a golden of."""
    longest = model.config.context_tokens - NUM_STEPS
    texts = [
        [(7919 * i + n) % model.config.vocab_size for i in range(min(n, longest) + NUM_STEPS)] for n in (30, 63, 80)
    ]
    return [GoldenPrompt(text[:-NUM_STEPS], text[-NUM_STEPS:], [], []) for text in texts]


def _num_pages(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)
