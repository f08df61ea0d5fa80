"""A read that is given up, late or cut takes its connection with it: nobody gets another's bytes."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.patience import Patience
from kvstore.redis.tier import RedisTier, key_of
from kvstore.tier import BlobName
from schemas.errors import KvUnavailable
from tests.kvstore.delaying_proxy import DelayingProxy, delayed
from tests.kvstore.valkey import Valkey

NUM_KEYS = 16
NAMES = [BlobName("default", bytes([i]) * 32) for i in range(NUM_KEYS)]
DELAY_S = 0.004


def blob(number: int) -> bytes:
    """Small ones, which come in one piece, and ones of 200 kB and of 3 MB, which come in several."""
    if number == 0:
        return b"large" * 600_000
    return bytes([number + 1]) * (5000 + number if number % 2 else 200_000 + number)


@pytest.fixture
def proxy(valkey: Valkey) -> Iterator[DelayingProxy]:
    client = valkey.client()
    for number, name in enumerate(NAMES):
        client.set(key_of(name), blob(number))
    with delayed(valkey.port, DELAY_S, piece_bytes=500_000) as proxy:
        yield proxy


def read(tier: RedisTier, number: int, patience: Patience | None = None) -> bytes | None:
    """None: a failure that was told."""
    into = memoryview(bytearray(3_100_000))
    try:
        size = tier.read(NAMES[number], [into[:128], into[128:]], patience)
    except KvUnavailable:
        return None
    assert size is not None
    return bytes(into[:size])


def give_up_while_reading(tier: RedisTier, rng: random.Random, number: int) -> bytes | None:
    patience = Patience()
    timer = threading.Timer(rng.uniform(0, 2.5 * DELAY_S), patience.give_up)
    timer.start()
    found = read(tier, number, patience)
    timer.join()
    return found


def run_out_of_time(tier: RedisTier, rng: random.Random, number: int) -> bytes | None:
    return read(tier, number, Patience(rng.uniform(0.001, 2.5 * DELAY_S)))


def time_out_in_a_pipeline(tier: RedisTier, rng: random.Random, number: int) -> bytes | None:
    impatient = RedisTier("redis://unused", timeout_s=rng.uniform(0.001, 1.5 * DELAY_S))
    impatient._servers = tier._servers
    try:
        assert impatient.present(NAMES) == NUM_KEYS
        return blob(number)
    except KvUnavailable:
        return None


@pytest.mark.parametrize("abandon", [give_up_while_reading, run_out_of_time, time_out_in_a_pipeline])
def test_nobody_gets_anothers_bytes(
    proxy: DelayingProxy, abandon: Callable[[RedisTier, random.Random, int], bytes | None]
) -> None:
    """CASES 13: 1,000 abandoned exchanges on each way, each followed by a read of another key on the same pool."""
    tier = RedisTier(proxy.url, timeout_s=10.0)

    def rounds(seed: int) -> tuple[int, int]:
        rng = random.Random(seed)
        num_lost = num_wrong = 0
        for _ in range(125):
            first, second = rng.sample(range(NUM_KEYS), 2)
            found = abandon(tier, rng, first)
            num_lost += found is None
            num_wrong += found not in (None, blob(first))
            num_wrong += read(tier, second) != blob(second)  # nobody gives this one up
        return num_lost, num_wrong

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(rounds, range(8)))
    tier.close()
    assert sum(wrong for _, wrong in results) == 0
    assert sum(lost for lost, _ in results) > 100, "most reads must really be abandoned, or this shows nothing"
    assert proxy.num_links > 100, "an abandoned exchange takes its connection with it"


def test_giving_up_ends_a_read_of_a_frozen_server_at_once(valkey: Valkey) -> None:
    tier = RedisTier(valkey.url, timeout_s=60.0)
    valkey.client().set(key_of(NAMES[0]), blob(0))
    assert read(tier, 0) == blob(0)
    patience = Patience()
    valkey.freeze()
    try:
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(read, tier, 0, patience)
            while patience._abort is None:
                time.sleep(0.001)
            patience.give_up()
            assert reading.result(10) is None
    finally:
        valkey.thaw()
    assert read(tier, 0) == blob(0)
    tier.close()


def test_who_gave_up_before_reads_nothing(valkey: Valkey) -> None:
    tier = RedisTier(valkey.url, timeout_s=60.0)
    patience = Patience()
    patience.give_up()
    assert patience.is_over and read(tier, 0, patience) is None
    tier.close()


def test_a_huge_value_under_a_blocks_name_is_not_transferred(valkey: Valkey) -> None:
    """CASES 6: the size is told, the connection given up, nothing allocated for it."""
    valkey.client().setrange(key_of(NAMES[0]), 400_000_000, b"end")
    tier = RedisTier(valkey.url, timeout_s=10.0)
    before = valkey.client().info("clients")["total_blocking_keys"]
    into = memoryview(bytearray(10_000))
    assert tier.read(NAMES[0], [into]) == 400_000_003
    tier.quarantine(NAMES[0])
    assert tier.present(NAMES) == 0 and before == 0
    kept = valkey.client().hgetall("kvrelay:quarantine:1")
    assert kept[b"size"] == b"400000003" and kept[b"blob"] == b""
    tier.close()


def test_a_server_that_restarts_is_met_again_without_an_error(valkey: Valkey) -> None:
    """Idle connections of before are noticed and replaced, not used."""
    tier = RedisTier(valkey.url, timeout_s=10.0)
    valkey.client().set(key_of(NAMES[0]), blob(0))
    assert read(tier, 0) == blob(0)
    valkey.client().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert read(tier, 0) == blob(0)
    tier.close()
