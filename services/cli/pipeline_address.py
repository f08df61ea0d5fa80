"""Where the pipeline that a command talks to is, and what its model is called there."""

from pathlib import Path

from schemas.errors import SetupError
from schemas.subjects import model_slug
from services.config import Settings
from services.supervisor import runtime_file


def bus_url(settings: Settings) -> str:
    """bus.url, or the NATS of the pipeline that runs on the data folder. Raises `SetupError` if there is neither."""
    if settings.bus.url:
        return settings.bus.url
    running = runtime_file.read(settings.kv.data_dir)
    if running is None:
        raise SetupError(
            f"no pipeline runs on {Path(settings.kv.data_dir).absolute()}: start one with `kvrelay up`, "
            "name its folder with --data, or say which NATS to ask with --nats URL"
        )
    return running.nats


def served_slug(settings: Settings) -> str:
    """The model's name in subjects. Known for what is ready here; derived from its name for what runs elsewhere."""
    from services.models import registry, smollm2

    spec = settings.compute.model
    if spec == smollm2.SPEC:
        return model_slug(smollm2.NAME)
    here = str(Path(spec).absolute())
    slugs = [files.slug for files in registry.cached(settings.kv.data_dir) if files.source in (spec, here)]
    return slugs[0] if slugs else model_slug(spec.partition("@")[0])
