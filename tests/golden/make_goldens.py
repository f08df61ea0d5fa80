"""Writes greedy_float32.json: what `transformers` answers, in float32 and one process, to 20 frozen prompts.

    python -m tests.golden.make_goldens [DATA_DIR]

Run it only when the default model or the prompts change. Every continuation has 64 tokens, end tokens ignored. A
prompt whose best two logits come within 1e-3 of each other somewhere is replaced by the next passage, and listed.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from schemas.job import Message
from services.models.registry import resolve
from services.text.model import TextModel, load_text
from tests.golden.passages import PASSAGES, SYSTEM

MAX_TOKENS = 64
MIN_GAP = 1e-3
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 128, 1000, 2048)
CHATS = {
    "rain": [("user", "Write one sentence about rain.")],
    "rain for the clerk": [("system", SYSTEM), ("user", "Write one sentence about rain.")],
    "library": [("system", SYSTEM), ("user", "When does the library open?")],
    "france": [("user", "What is the capital of France?")],
    "emoji": [("user", "Reply with only the emoji 🎉")],
    "repeat": [("user", "Repeat exactly this text: 👋🏽 日本語 🎉")],
    "turns": [
        ("user", "Name a fruit that is red."),
        ("assistant", "An apple."),
        ("user", "And one that is yellow?"),
    ],
}
RAWS = {
    "alphabet": "Here is the English alphabet: ABC",
    "code": "def fibonacci(n):\n    ",
    "chinese": "北京是中国的首都，",
}


def main() -> None:
    data_dir = Path(sys.argv[1] if len(sys.argv) > 1 else ".kvrelay")
    files = resolve("smollm2", data_dir)
    text = load_text(files)
    model = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32)
    goldens, replaced = [], []
    for name, candidates in prompts(text):
        for ids in candidates:
            tokens, gap = greedy(model, ids)
            if gap >= MIN_GAP:
                goldens.append({"name": name, "prompt_token_ids": ids, "token_ids": tokens, "min_gap": round(gap, 5)})
                break
            replaced.append({"name": name, "prompt_token_ids": ids[:16], "min_gap": gap})
        else:
            raise SystemExit(f"{name}: every candidate has a gap below {MIN_GAP}")
        print(name, len(goldens[-1]["prompt_token_ids"]), goldens[-1]["min_gap"], file=sys.stderr)
    document = {"model": files.slug, "fingerprint": files.fingerprint.hex(), "goldens": goldens, "replaced": replaced}
    target = Path(__file__).with_name("greedy_float32.json")
    target.write_text(json.dumps(document, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n", "utf-8")


def prompts(text: TextModel) -> list[tuple[str, list[list[int]]]]:
    """Names and, for each, the prompts to try."""
    assert text.template is not None
    found: list[tuple[str, list[list[int]]]] = []
    for name, messages in CHATS.items():
        turns = [Message(role, content) for role, content in messages]
        found.append((name, [text.template.render_ids(turns, text.tokenizer)]))
    found += [(name, [text.tokenizer.encode_prompt(raw)]) for name, raw in RAWS.items()]
    passages = [text.tokenizer.encode_prompt(passage) for passage in PASSAGES]
    joined = [token for passage in passages * 2 for token in passage]
    for length in LENGTHS:
        starts = range(0, len(joined) - length, 13)
        found.append((f"{length} tokens", [joined[start : start + length] for start in starts]))
    return found


def greedy(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], float]:
    """The continuation, and the smallest distance between a best and a second-best logit along it."""
    tokens: list[int] = []
    gap = float("inf")
    inputs, cache = torch.tensor([ids]), None
    with torch.inference_mode():
        while len(tokens) < MAX_TOKENS:
            out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            best = out.logits[0, -1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
            inputs = best.indices[:1].view(1, 1)
    return tokens, gap


if __name__ == "__main__":
    main()
