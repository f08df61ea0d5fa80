"""The bench of grammars runs on the default model, with sequences held to its schema beside free ones."""

from services.bench import grammar
from services.settings import Settings
from tests.models.default_model import default_model


def test_it_measures_both() -> None:
    default_model()
    first, row = grammar.run(Settings(), 1, [2], 3)
    assert first["compile_first_s"]
    assert row["batch"] == 2 and row["held_ms"] and row["free_ms"] and row["step_ratio"] and row["tpot_ratio"]
