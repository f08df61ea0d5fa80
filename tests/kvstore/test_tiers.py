"""The contract of a tier, held by each of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.nvme import NvmeTier
from kvstore.tier import Tier
from tests.kvstore.blocks import TTL_S
from tests.kvstore.memory_tier import MemoryTier
from tests.kvstore.tier_contract import Clock, Life, TierContract
from tests.kvstore.wrappers import MeteredTier


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self, clock: Clock, tmp_path: Path) -> Tier:
        return MemoryTier(clock)

    def plant(self, tier: Tier, key: bytes, blob: bytes) -> None:
        assert isinstance(tier, MemoryTier)
        tier.blobs[key] = (blob, Life(0.0, Clock().now + TTL_S))

    def peek(self, tier: Tier, key: bytes) -> bytes | None:
        assert isinstance(tier, MemoryTier)
        return tier.blobs[key][0] if key in tier.blobs else None


class TestNvmeTier(TierContract):
    @pytest.fixture
    def tier(self, clock: Clock, tmp_path: Path) -> Iterator[Tier]:
        tier = NvmeTier(tmp_path / "kv", 10**9, clock)
        yield tier
        tier.close()

    def path(self, tier: Tier, key: bytes) -> Path:
        assert isinstance(tier, NvmeTier)
        return Path(tier.path(key))

    def plant(self, tier: Tier, key: bytes, blob: bytes) -> None:
        path = self.path(tier, key)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(blob)
        os.utime(path, (Clock().now, Clock().now))

    def peek(self, tier: Tier, key: bytes) -> bytes | None:
        path = self.path(tier, key)
        return path.read_bytes() if path.exists() else None


class TestWrappedTier(TestMemoryTier):
    """A wrapper is a tier like any other."""

    @pytest.fixture
    def tier(self, clock: Clock, tmp_path: Path) -> Tier:
        return MeteredTier(MemoryTier(clock))

    def plant(self, tier: Tier, key: bytes, blob: bytes) -> None:
        assert isinstance(tier, MeteredTier)
        super().plant(tier.inner, key, blob)

    def peek(self, tier: Tier, key: bytes) -> bytes | None:
        assert isinstance(tier, MeteredTier)
        return super().peek(tier.inner, key)
