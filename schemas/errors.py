"""The error tree: one class for each thing a caller would do differently.

Each class fixes its wire code, its HTTP status, whether the same request may be sent again, and what
happens to the queue message that caused it. Foreign errors are translated at the fence where they
enter, with their cause kept.
"""

import enum


class Settle(enum.Enum):
    """What becomes of the queue message; applied in one place, `services.bus.delivery`."""

    ACK = "ack"  # done, or ended for good: forget the message
    REDELIVER = "redeliver"  # somebody may do better a little later
    HAND_BACK = "hand_back"  # the worker leaves: the next one goes on at once, before what is queued
    DEAD_LETTER = "dead_letter"  # keep a copy on kvrelay.dead.<tenant>.<job>, then forget it
    DROP = "drop"  # the claim is not ours any more: settle nothing


class KvrelayError(Exception):
    """Base of every error that kvrelay raises on purpose.

    `message` is written for the caller and says what to do; `param` names the field at fault, if one is.
    """

    code = "internal"
    http_status = 500
    retryable = False
    settle = Settle.ACK

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def type(self) -> str:
        """OpenAI's coarse `error.type`."""
        if self.http_status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.http_status < 500 else "server_error"


class InvalidRequest(KvrelayError):
    code = "invalid_request"
    http_status = 400


class Undecodable(InvalidRequest):
    """Bytes that are no message of ours at all: whoever sent them may not hear of it, so they are kept."""

    settle = Settle.DEAD_LETTER


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedVersion(InvalidRequest):
    """A message of a newer wire version than this process speaks."""

    code = "unsupported_version"
    settle = Settle.DEAD_LETTER


class GrammarFailed(InvalidRequest):
    """The grammar of an answer became too complex on the way, or the tokens before are not the grammar's."""


class Unauthorized(KvrelayError):
    code = "unauthorized"
    http_status = 401


class Forbidden(KvrelayError):
    code = "forbidden"
    http_status = 403


class ModelNotFound(KvrelayError):
    code = "model_not_found"
    http_status = 404


class JobNotFound(KvrelayError):
    """Nobody has written of the job: it does not exist, was not begun, or is forgotten."""

    code = "not_found"
    http_status = 404


class RequestTimeout(KvrelayError):
    """The client did not say in time what it wants."""

    code = "request_timeout"
    http_status = 408


class IdConflict(KvrelayError):
    """The id already names another job (another digest) of the same tenant."""

    code = "id_conflict"
    http_status = 409
    settle = Settle.DEAD_LETTER


class TooLarge(KvrelayError):
    code = "too_large"
    http_status = 413


class QueueFull(KvrelayError):
    code = "queue_full"
    http_status = 429
    retryable = True


class StorageFull(KvrelayError):
    """What is kept has reached its cap: something must be removed first."""

    code = "storage_full"
    http_status = 507


class Cancelled(KvrelayError):
    code = "cancelled"
    http_status = 499


class Internal(KvrelayError):
    """Our fault. Redelivered: another worker, or the same one alone, may manage it."""

    settle = Settle.REDELIVER


class BegunElsewhere(Internal):
    """Another build began the job and reads its prompt in another way: only a worker of that one can go on."""


class NotFinite(Internal):
    """The model produced NaN or infinity for this job alone; it would do so again."""

    settle = Settle.ACK


class ClaimLost(KvrelayError):
    """Another worker has the job: stop, and leave its message alone."""

    settle = Settle.DROP


class HandedBack(KvrelayError):
    """The worker leaves, and the job goes on in another one from the events and blocks that are stored."""

    settle = Settle.HAND_BACK


class Poisoned(KvrelayError):
    """The job ran alone in its worker `MAX_LONE_RUNS` times and never got to a new event."""

    code = "poisoned"
    settle = Settle.DEAD_LETTER


class Unavailable(KvrelayError):
    """Base of the 503s: nothing is wrong with the request, try again later."""

    http_status = 503
    retryable = True


class BusUnavailable(Unavailable):
    """The broker did not answer: it is down, restarting, or out of reach. The job itself may go on elsewhere."""

    settle = Settle.REDELIVER


class NoWorker(Unavailable):
    code = "no_worker"


class KvUnavailable(Unavailable):
    code = "kv_unavailable"


class KvRefused(KvUnavailable):
    """The store answers, and would not do this one thing: it is full, say, and can still be read."""


class KvSkipped(KvUnavailable):
    """The store was not asked: it failed a moment ago, and nothing says yet that it works again."""


class BuildGone(Unavailable):
    """The build that started the job has no workers left to finish it."""

    code = "build_gone"


class UpstreamUnavailable(KvrelayError):
    """The server that requests are forwarded to is down, broke off, or answered what is no answer."""

    code = "upstream_unavailable"
    http_status = 502
    retryable = True


class UpstreamTimeout(KvrelayError):
    code = "upstream_timeout"
    http_status = 504
    retryable = True


class DeadlineExceeded(KvrelayError):
    code = "deadline_exceeded"
    http_status = 504


class SetupError(KvrelayError):
    """A process cannot start: bad configuration, a model that is missing or unsupported, a failed self-check."""

    code = "setup"


def _tree(cls: type[KvrelayError]) -> list[type[KvrelayError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _tree(sub))]


# Reversed, so that of two classes with one code the more general one stands for it.
BY_CODE: dict[str, type[KvrelayError]] = {cls.code: cls for cls in reversed(_tree(KvrelayError)[1:])}


def error_from_code(code: str, message: str, param: str | None = None) -> KvrelayError:
    """The error that an `error` event or an HTTP body describes; an unknown code is `Internal`."""
    return BY_CODE.get(code, Internal)(message, param=param)
