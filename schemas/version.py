"""Which kvrelay this is, for those who ask over HTTP or NATS."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """0.0.0 for a checkout that was never installed."""
    try:
        return version("kvrelay")
    except PackageNotFoundError:
        return "0.0.0"
