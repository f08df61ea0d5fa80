"""What goes wrong with a Redis server, in words that say what to do; never with a password in them."""

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from kvstore.redis.link import Garbled, ReplyError
from schemas.errors import KvRefused, KvUnavailable

_LOGIN = "does not accept the user or password of kv.redis_url"

# The first word of an error reply -> is only this refused, and what it means.
_REPLIES: dict[str, tuple[type[KvUnavailable], str]] = {
    "OOM": (KvRefused, "is full: raise its maxmemory, or set maxmemory-policy allkeys-lru"),
    "READONLY": (KvRefused, "is a read-only replica: kv.redis_url must name the primary"),
    "MISCONF": (KvRefused, "takes no writes because it cannot save its data set to disk"),
    "NOREPLICAS": (KvRefused, "takes no writes because it has too few replicas"),
    "ASK": (KvRefused, "is moving this part of the keys to another node"),
    "TRYAGAIN": (KvRefused, "is moving this part of the keys to another node"),
    "WRONGTYPE": (KvRefused, "has something else under the name of a block"),
    "NOAUTH": (KvUnavailable, _LOGIN),
    "WRONGPASS": (KvUnavailable, _LOGIN),
    "NOPERM": (KvUnavailable, "does not allow this to the user of kv.redis_url"),
    "LOADING": (KvUnavailable, "is still loading its data set"),
    "CLUSTERDOWN": (KvUnavailable, "says that its cluster is down"),
    "MASTERDOWN": (KvUnavailable, "has lost its primary"),
    "MOVED": (KvUnavailable, "is part of a Redis Cluster: set kv.redis_cluster = true"),
}


@contextmanager
def translated(server: str, timeout_s: float, secret: str = "") -> Iterator[None]:
    """Foreign errors become `KvUnavailable`, with their cause. `server`: how people know it, without a login."""
    try:
        yield
    except ReplyError as error:
        raise _of_reply(server, error) from error
    except exceptions.AuthenticationError as error:
        raise KvUnavailable(f"redis {server} {_LOGIN}") from error
    except exceptions.BusyLoadingError as error:
        raise KvUnavailable(f"redis {server} {_REPLIES['LOADING'][1]}") from error
    except (exceptions.TimeoutError, TimeoutError) as error:
        raise KvUnavailable(f"redis {server} did not answer within {timeout_s:g} s") from error
    except (exceptions.RedisError, OSError, Garbled) as error:
        text = str(error).replace(secret, "***") if secret else str(error)
        raise KvUnavailable(f"redis {server} is out of reach: {text}") from error


def _of_reply(server: str, error: ReplyError) -> KvUnavailable:
    kind, words = _REPLIES.get(error.code, (KvUnavailable, f"answers {error.code}"))
    return kind(f"redis {server} {words}")
