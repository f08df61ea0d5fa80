"""On the default model, ten kept tasks and free text come out the same with guesses and without, in fewer steps."""

from services.bench.edit_tasks import FREE_TEXTS, TASKS
from services.bench.engine import load_model
from services.bench.speculation import FREE_TEXT, TASK, generate, prompt_ids
from services.engine.engine import Engine
from services.engine.pages import PagePool
from services.settings import Settings
from services.text.model import load_text
from tests.models.default_model import default_model

NUM_TOKENS = 48


def test_guesses_change_no_token() -> None:
    settings = Settings()
    text = load_text(default_model())
    model = load_model(settings, "int8")
    pool = PagePool(20, model.page_form(settings.kv.block_tokens), max_idle=0)
    pool.reserve(20)
    engine = Engine(model, pool)
    num_steps = 0
    try:
        for tasks, sampling in ((TASKS, TASK), (FREE_TEXTS, FREE_TEXT)):
            for name, task in tasks.items():
                prompt = prompt_ids(text, task)
                plain, guessed = (
                    generate(engine, settings, prompt, sampling, NUM_TOKENS, text.eos_ids, max_draft=count)
                    for count in (0, settings.scheduler.max_proposals)
                )
                assert guessed.tokens == plain.tokens, name
                num_steps += guessed.num_steps if sampling is TASK else 0
    finally:
        engine.close()
    assert num_steps < len(TASKS) * NUM_TOKENS / 1.5
