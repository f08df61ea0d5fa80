"""The default model, prepared once in the checkout's data folder, which the demo uses too."""

import functools
from pathlib import Path

from services.models.files import ModelFiles
from services.models.registry import resolve

DATA_DIR = Path(__file__).parents[2] / ".kvrelay"


@functools.cache
def default_model() -> ModelFiles:
    return resolve("smollm2", DATA_DIR)
