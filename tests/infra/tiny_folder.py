"""The tiny model as a Hugging Face folder, for processes that are started as people start them."""

import json
import shutil
from pathlib import Path

from tests.gateway.tiny_model import EOS, TEMPLATE, tokenizer_json
from tests.pipeline.tiny import CONTEXT_TOKENS, tiny_files


def write_tiny_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    files = tiny_files()
    shutil.copy(files.weights[0], folder / "model.safetensors")
    tokenizer_config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE, "model_max_length": CONTEXT_TOKENS}
    for name, text in (
        ("config.json", json.dumps({**files.config, "eos_token_id": EOS})),
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", json.dumps(tokenizer_config)),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    return folder
