"""What verifying costs by itself. For benchmarks."""

from blake3 import blake3


def hash_once(payload: memoryview) -> None:
    """BLAKE3 on one core, as every read does."""
    blake3(payload).digest()
