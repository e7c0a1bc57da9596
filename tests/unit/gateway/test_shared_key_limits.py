"""Processes that share a file of accounts hold a key's limits as one."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman_gateway.core.rate_limits import KeyCharge, RateLimited, RateLimiter, RateLimits
from pointsman_gateway.io.processes.shared_key_limits import SharedKeyLimitsFile


def digest(name: int) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "limits"


# Who asks (one of three), for which key, whether something is closed before, tokens, and the pause before it in s.
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans(), st.integers(0, 40), st.floats(0, 20)), max_size=50
)


@settings(max_examples=150)
@given(steps=STEPS, limits=st.builds(RateLimits, st.integers(0, 5), st.integers(0, 60), st.integers(0, 3)))
def test_three_processes_admit_what_one_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bool, int, float]], limits: RateLimits
) -> None:
    file = tmp_path_factory.mktemp("shared") / "limits"
    usage_file = [SharedKeyLimitsFile(file, number, 3) for number in range(3)]
    several, alone = [RateLimiter(usage_store.usage_of) for usage_store in usage_file], RateLimiter()
    open_ones: list[tuple[KeyCharge, KeyCharge]] = []
    now = 0.0
    for who, key, close, tokens, pause in steps:
        now += pause
        if close and open_ones:
            for admission in open_ones.pop(0):
                admission.close()
        found: list[KeyCharge | float] = []
        for limiter in (several[who], alone):
            try:
                admission = limiter.admit(digest(key), limits, now)
            except RateLimited as limited:
                found.append(limited.retry_after_s)
            else:
                admission.charge(tokens, now)
                found.append(admission)
        one, other = found
        if isinstance(one, KeyCharge) and isinstance(other, KeyCharge):
            open_ones.append((one, other))
        else:
            assert one == other
    for shared in usage_file:
        shared.close()


def test_more_keys_than_there_was_room_for(file: Path) -> None:
    usage_file = [SharedKeyLimitsFile(file, number, 2) for number in range(2)]
    one, other = (RateLimiter(store.usage_of) for store in usage_file)
    for key in range(200):
        one.admit(digest(key), RateLimits(in_flight=1), 0.0)
    for key in range(200):
        with pytest.raises(RateLimited):
            other.admit(digest(key), RateLimits(in_flight=1), 0.0)
    for store in usage_file:
        store.close()


def test_what_a_dead_process_had_in_flight_is_over_when_it_is_replaced(file: Path) -> None:
    first, second = SharedKeyLimitsFile(file, 0, 2), SharedKeyLimitsFile(file, 1, 2)
    limits = RateLimits(requests_per_minute=3, in_flight=2)
    RateLimiter(first.usage_of).admit(digest(0), limits, 0.0)
    living = RateLimiter(second.usage_of)
    living.admit(digest(0), limits, 0.0)
    with pytest.raises(RateLimited, match="in flight"):
        living.admit(digest(0), limits, 0.0)
    first.close()
    again = SharedKeyLimitsFile(file, 0, 2)
    living.admit(digest(0), limits, 0.0).close()
    with pytest.raises(RateLimited, match="per minute"):
        living.admit(digest(0), limits, 0.0)
    again.close()
    second.close()


def _admit_many(file: Path, number: int, tries: int) -> int:
    usage_file = SharedKeyLimitsFile(file, number, 2)
    limiter, admitted = RateLimiter(usage_file.usage_of), 0
    for _ in range(tries):
        try:
            limiter.admit(digest(0), RateLimits(requests_per_minute=1_000), 0.0).close()
            admitted += 1
        except RateLimited:
            pass
    usage_file.close()
    return admitted


def test_two_processes_at_once_lose_no_request(file: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        admitted = pool.starmap(_admit_many, [(file, 0, 900), (file, 1, 900)])
    assert sum(admitted) == 1_000


def test_a_key_is_a_digest(file: Path) -> None:
    usage_file = SharedKeyLimitsFile(file, 0, 1)
    for bad in (b"", b"k", bytes(32)):
        with pytest.raises(ValueError, match="digest"):
            usage_file.usage_of(bad)
    usage_file.close()


def test_the_disk_has_given_all_that_is_mapped(file: Path) -> None:
    """All mapped blocks must be allocated. A write to a block that a full disk cannot allocate ends the process by SIGBUS."""
    usage_file = SharedKeyLimitsFile(file, 0, 2)
    for name in range(200):
        usage_file.usage_of(digest(name))
        status = file.stat()
        assert status.st_blocks * 512 >= status.st_size
    usage_file.close()
