"""From a message on the prefill or rework queue to what has to be computed, everything resolved.

A job and a hand-off end in the same form: a hand-off. Knows nothing of KV or the batch.
"""

from datetime import UTC, datetime

from schemas.errors import IdConflict, InvalidRequest, ModelNotFound
from schemas.handoff import Handoff
from schemas.job import MAX_TIMEOUT_S, Job, Sampling, job_digest
from schemas.subjects import derived_seed, model_slug
from services.text.model import TextModel
from services.text.prompt import resolve_max_tokens, resolve_prompt
from services.worker.history import History


def draft_handoff(
    job: Job, *, tenant: str, job_id: str, origin: str, published_at: float, build: str, text: TextModel
) -> Handoff:
    """The hand-off that prefill will fill in.

    `published_at`: unix seconds by the broker. Raises `InvalidRequest`, `ContextLengthExceeded` or `ModelNotFound`.
    """
    if job.model is not None and model_slug(job.model) != text.slug:
        raise ModelNotFound(f"this queue serves {text.slug}, the job asks for {job.model[:100]}", param="model")
    # A template that shows the date must render the same at every delivery: it shows the day of publication.
    prompt_ids = resolve_prompt(job, text, datetime.fromtimestamp(published_at, UTC))
    outside = next((token for token in job.logit_bias if token >= text.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(
            f"logit_bias names token {outside}, the vocabulary ends at {text.vocab_size - 1}",
            param="logit_bias",
        )
    fields = {name: getattr(job, name) for name in Sampling.__struct_fields__}
    fields["seed"] = derived_seed(tenant, job_id) if job.seed is None else job.seed
    fields["max_tokens"] = resolve_max_tokens(job, len(prompt_ids), text.context_tokens)
    return Handoff(
        tenant=tenant,
        job=job_id,
        origin=origin,
        digest=job_digest(job),
        build=build,
        hop=0,
        last=0,
        timeout_left_s=job.timeout_s or MAX_TIMEOUT_S,
        prompt_token_ids=prompt_ids,
        sampling=Sampling(**fields),
        first=[],
        stored_blocks=0,
        cached_tokens=0,
        salt=job.cache_salt,
        conversation=job.messages is not None,
        on_disconnect=job.on_disconnect,
        owner=job.owner,
    )


def is_repeat(history: History, job: Job, job_id: str, origin: str) -> bool:
    """Whether the reply subject belongs to an earlier message with the same id and the same job.

    Raises `IdConflict` if it belongs to another job, or to another message that ended before it said which job.
    """
    if history.origin in (None, origin):
        return False
    if history.start is None or history.start.digest != job_digest(job):
        raise IdConflict(f"the id {job_id} already names another job", param="id")
    return True
