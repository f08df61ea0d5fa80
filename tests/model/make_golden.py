"""Makes a golden with `transformers` in float32: `python -m tests.model.make_golden [spec] [data folder]`."""

import sys
from pathlib import Path

import msgspec
import torch
import transformers

from schemas.job import Message
from services.engine.golden import FOLDER, Golden, GoldenPrompt
from services.engine.weight_source import open_weights
from services.models.files import ModelFiles
from services.models.registry import resolve
from services.text.model import load_text

NUM_TOKENS = 10
SYSTEM = (
    "You are a careful clerk at a small public library in the town of Ashford. Answer every question in one short "
    "sentence. The library opens at nine in the morning and closes at six in the evening. Members may borrow five "
    "books for three weeks. Late books cost ten pence a day."
)
# Prompts that tell faults apart: the answer changes when a token is fed twice or a block is lost.
PROMPTS = [
    [("user", "What is the capital of France?")],
    [("user", "Write one sentence about rain.")],
    [("system", SYSTEM), ("user", "When does the library open?")],
]


def oracle(files: ModelFiles) -> torch.nn.Module:
    """The `transformers` model in float32, with the weights that kvrelay reads."""
    config = transformers.AutoConfig.from_pretrained(files.path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with open_weights(files.weights, files.config) as source:
        stored = source.formats()
        weights = {name: source.read(name, *own.shape) for name, own in model.state_dict().items() if name in stored}
    missing, _ = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and stored.keys() == weights.keys()
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def make_prompt(model: torch.nn.Module, ids: list[int]) -> GoldenPrompt:
    tokens: list[int] = []
    logit_ids, logits = [], []
    for _ in range(NUM_TOKENS):
        row = model(torch.tensor([ids + tokens])).logits[0, -1]
        # The highest, and some from all over the vocabulary.
        kept = [*row.topk(8).indices.tolist(), *range(0, row.shape[0], row.shape[0] // 8)]
        logit_ids.append(kept)
        logits.append([round(value, 5) for value in row[kept].tolist()])
        tokens.append(int(row.argmax()))
    return GoldenPrompt(ids, tokens, logit_ids, logits)


def main(spec: str = "smollm2", data_dir: str = ".kvrelay") -> None:
    files = resolve(spec, data_dir, print)
    text = load_text(files)
    model = oracle(files)
    prompts = [
        text.template.render_ids([Message(role=role, content=content) for role, content in messages], text.tokenizer)
        for messages in PROMPTS
    ]
    golden = Golden(
        files.slug,
        f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        [make_prompt(model, ids) for ids in prompts],
    )
    folder = Path(__file__).parents[2] / "services" / "engine" / FOLDER
    path = folder / f"{files.fingerprint.hex()}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(golden), indent=1) + b"\n")
    for prompt in golden.prompts:
        print(len(prompt.ids), text.tokenizer.decode(prompt.tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
