"""The contract of a tier, held by each of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.nvme import NvmeTier
from kvstore.tier import BlobName, Tier
from tests.kvstore.blocks import TTL_S
from tests.kvstore.memory_tier import MemoryTier
from tests.kvstore.tier_contract import Clock, Life, TierContract
from tests.kvstore.wrappers import MeteredTier


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self, clock: Clock, tmp_path: Path) -> Tier:
        return MemoryTier(clock)

    def plant(self, tier: Tier, name: BlobName, blob: bytes) -> None:
        assert isinstance(tier, MemoryTier)
        tier.blobs[name] = (blob, Life(0.0, Clock().now + TTL_S))

    def peek(self, tier: Tier, name: BlobName) -> bytes | None:
        assert isinstance(tier, MemoryTier)
        return tier.blobs[name][0] if name in tier.blobs else None


class TestNvmeTier(TierContract):
    @pytest.fixture
    def tier(self, clock: Clock, tmp_path: Path) -> Iterator[Tier]:
        tier = NvmeTier(tmp_path / "kv", 10**9, clock)
        yield tier
        tier.close()

    def path(self, tier: Tier, name: BlobName) -> Path:
        assert isinstance(tier, NvmeTier)
        return Path(tier.path(name))

    def plant(self, tier: Tier, name: BlobName, blob: bytes) -> None:
        path = self.path(tier, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob)
        os.utime(path, (Clock().now, Clock().now))

    def peek(self, tier: Tier, name: BlobName) -> bytes | None:
        path = self.path(tier, name)
        return path.read_bytes() if path.exists() else None


class TestWrappedTier(TestMemoryTier):
    """A wrapper is a tier like any other."""

    @pytest.fixture
    def tier(self, clock: Clock, tmp_path: Path) -> Tier:
        return MeteredTier(MemoryTier(clock))

    def plant(self, tier: Tier, name: BlobName, blob: bytes) -> None:
        assert isinstance(tier, MeteredTier)
        super().plant(tier.inner, name, blob)

    def peek(self, tier: Tier, name: BlobName) -> bytes | None:
        assert isinstance(tier, MeteredTier)
        return super().peek(tier.inner, name)
