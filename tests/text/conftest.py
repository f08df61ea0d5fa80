"""The default model's text side, and `transformers` as the oracle beside it."""

import warnings
from typing import Any

import pytest

from services.models.files import ModelFiles
from services.text.model import TextModel, load_text
from services.text.tokenizer import Tokenizer
from tests.models.default_model import default_model
from tests.text.tiny_tokenizers import byte_level, sentencepiece_like


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    return default_model()


@pytest.fixture(scope="session")
def text(files: ModelFiles) -> TextModel:
    return load_text(files)


@pytest.fixture(scope="session")
def oracle(files: ModelFiles) -> Any:
    """`transformers`' tokenizer of the same model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not ours
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(files.path))


@pytest.fixture(scope="session", params=["smollm2", "sentencepiece", "byte level"])
def any_tokenizer(request: pytest.FixtureRequest, text: TextModel) -> Tokenizer:
    """Each kind of tokenizer that the code tells apart."""
    if request.param == "smollm2":
        return text.tokenizer
    return Tokenizer(sentencepiece_like() if request.param == "sentencepiece" else byte_level())
