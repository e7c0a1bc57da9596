"""A write is waited for asleep, and its end is never missed, misjudged or put off for long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from pointsman_connector.layerwise.sleeping_writes import (
    MAX_PIECES,
    SLEEP_SHARE,
    WRITE_S,
    SleepingTransferEngine,
    Sources,
    last_start_s,
    patience_s,
    queued_pieces,
)

MB = 1_000_000
HERE = "10.0.0.1:700"


@dataclass
class Link:
    """A transfer engine and the machine's clocks: writes take their time; who asks spins until they have landed."""

    speed: float = 500 * MB
    opening_s: float = 0.0
    oversleep_s: float = 0.0
    broken: bool = False
    refuses: bool = False
    now: float = 0.0
    spun: float = 0.0
    slept: list[float] = field(default_factory=list)
    # When each batch that is not free began, and when it lands.
    batches: dict[int, tuple[float, float]] = field(default_factory=dict)
    synchronous: int = 0
    # Number of pieces of each write that was begun.
    parts: list[int] = field(default_factory=list)
    # Called once when the end of a write is waited for.
    meanwhile: Callable[[], object] | None = None

    def resting(self) -> SleepingTransferEngine:
        return SleepingTransferEngine(self, sleep=self.sleep, clock=lambda: self.now, cpu_clock=lambda: self.spun)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.oversleep_s

    def spin_until(self, end: float) -> None:
        self.spun += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def batch_transfer_sync_write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> int:
        self.synchronous += 1
        return -7

    def batch_transfer_async_write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> int:
        if self.refuses:
            return 0
        self.parts.append(len(src))
        number = 1_000 + len(self.parts)
        self.batches[number] = (self.now, self.now + self.opening_s + sum(lengths) / self.speed)
        self.opening_s = 0.0
        return number

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile()
        (number,) = batches
        began, lands = self.batches.pop(number)
        self.spin_until(min(lands, began + WRITE_S))
        return -1 if self.broken or lands > began + WRITE_S else 0

    def get_rpc_port(self) -> int:
        return 700


def write(engine: SleepingTransferEngine, size: int, session: str = HERE) -> int:
    return engine.batch_transfer_sync_write(session, [1, 2], [3, 4], [size // 2, size - size // 2])


def known(link: Link) -> SleepingTransferEngine:
    """An engine that has learned the link's speed."""
    engine = link.resting()
    for _ in range(2):
        assert write(engine, MB) == 0
    assert link.slept == [], "nothing is known of a link at first"
    link.spun = 0.0
    return engine


def test_most_of_a_write_is_slept_through() -> None:
    link = Link()
    engine = known(link)
    for _ in range(10):
        assert write(engine, 5 * MB) == 0
    assert link.slept == [pytest.approx(SLEEP_SHARE * 0.010)] * 10
    assert link.spun == pytest.approx(10 * (1 - SLEEP_SHARE) * 0.010)
    assert link.batches == {}


def test_opening_a_connection_says_nothing_of_its_speed() -> None:
    link = Link(opening_s=3.0)
    engine = known(link)
    assert write(engine, 5 * MB) == 0
    assert link.slept == [pytest.approx(SLEEP_SHARE * 0.010)]


def test_no_write_that_waits_for_a_connection_says_anything_of_its_speed() -> None:
    link = Link(opening_s=3.0)
    engine = link.resting()
    link.meanwhile = lambda: write(engine, MB // 2)
    assert write(engine, MB) == 0
    assert link.now > 3
    assert write(engine, 5 * MB) == write(engine, 5 * MB) == 0
    assert link.slept == [pytest.approx(SLEEP_SHARE * 0.010)]


def test_short_writes_are_not_slept_through_and_tell_nothing() -> None:
    link = Link()
    engine = known(link)
    link.speed = MB
    assert write(engine, 100_000) == 0
    assert link.slept == []
    link.speed = 500 * MB
    assert write(engine, 5 * MB) == 0
    assert link.slept == [pytest.approx(SLEEP_SHARE * 0.010)]


def test_each_host_has_a_speed_of_its_own() -> None:
    link = Link()
    engine = known(link)
    assert write(engine, 5 * MB, "10.0.0.2:700") == 0
    assert link.slept == []
    assert write(engine, 5 * MB, "10.0.0.1:701") == 0
    assert len(link.slept) == 1


def test_a_link_that_got_faster_is_not_overslept_for_long() -> None:
    link = Link(speed=50 * MB)
    engine = known(link)
    link.speed *= 10
    late = []
    for _ in range(16):
        began = link.now
        assert write(engine, 5 * MB) == 0
        late.append(link.now - began - 0.010)
    assert late[0] == pytest.approx(SLEEP_SHARE * 0.100 - 0.010)
    assert max(late[11:]) < 0.003


def test_one_stall_is_soon_forgotten() -> None:
    link = Link()
    engine = known(link)
    link.speed = MB / 4
    assert write(engine, 5 * MB) == 0
    link.speed = 500 * MB
    began = link.now
    assert write(engine, 5 * MB) == 0
    assert link.now - began < 0.015


def test_a_machine_that_oversleeps_is_not_taken_for_a_slow_link() -> None:
    link = Link(oversleep_s=0.020)
    engine = known(link)
    for _ in range(50):
        assert write(engine, 5 * MB) == 0
    assert max(link.slept) <= 0.0101


def test_a_failed_write_is_reported_and_teaches_nothing() -> None:
    link = Link()
    engine = known(link)
    link.broken, link.speed = True, 10 * MB
    for _ in range(3):
        assert write(engine, 5 * MB) < 0
    assert link.batches == {}
    link.broken, link.speed = False, 500 * MB
    assert write(engine, 5 * MB) == 0
    assert link.slept == [pytest.approx(SLEEP_SHARE * 0.010)] * 4


@pytest.mark.parametrize("known_bytes_per_s", [500 * MB, 1_000])
def test_a_write_that_never_lands_ends_in_time(known_bytes_per_s: float) -> None:
    link = Link()
    engine = known(link)
    engine._speeds["10.0.0.1"] = known_bytes_per_s
    link.speed = 1e-9
    began = link.now
    assert write(engine, 5 * MB) < 0
    assert link.now - began == pytest.approx(WRITE_S)
    assert link.batches == {}


def test_what_cannot_be_begun_is_left_to_the_synchronous_call() -> None:
    link = Link()
    engine = known(link)
    link.refuses = True
    assert write(engine, 5 * MB) == -7
    assert (link.synchronous, link.slept) == (1, [])


def test_a_write_of_many_pieces_is_made_in_parts() -> None:
    link = Link()
    engine = known(link)
    pieces = 2 * MAX_PIECES + 1
    began = link.now
    assert engine.batch_transfer_sync_write(HERE, range(pieces), range(pieces), [1_000] * pieces) == 0
    assert link.parts[-3:] == [MAX_PIECES, MAX_PIECES, 1]
    assert link.now - began == pytest.approx(pieces * 1_000 / link.speed, rel=0.2)
    link.speed = 1e-9
    assert engine.batch_transfer_sync_write(HERE, range(pieces), range(pieces), [1_000] * pieces) < 0
    assert link.parts[-1] == MAX_PIECES, "no part follows one that failed"
    assert link.batches == {}


def test_no_part_begins_after_the_timeout() -> None:
    link = Link()
    engine = known(link)
    link.speed = MAX_PIECES / (0.6 * WRITE_S)
    began = link.now
    pieces = 4 * MAX_PIECES
    assert engine.batch_transfer_sync_write(HERE, range(pieces), range(pieces), [1] * pieces) < 0
    assert link.parts[-2:] == [MAX_PIECES, MAX_PIECES]
    assert link.now - began < 2 * WRITE_S


def test_no_part_begins_after_the_sources_time() -> None:
    link = Link(speed=MAX_PIECES)
    engine = link.resting()
    pieces = 4 * MAX_PIECES
    sources = Sources(range(pieces), link.now + 1.5)
    assert engine.batch_transfer_sync_write(HERE, sources, range(pieces), [1] * pieces) < 0
    assert link.parts == [MAX_PIECES, MAX_PIECES]
    assert engine.batch_transfer_sync_write(HERE, sources, range(pieces), [1] * pieces) < 0
    assert link.parts == [MAX_PIECES, MAX_PIECES]


@pytest.mark.parametrize("write_s", [1, 5, 20, 30, 60, 120])
@pytest.mark.parametrize("abort_s", [4, 30, 60, 480])
def test_a_write_ends_before_its_receiver_gives_up(abort_s: float, write_s: float) -> None:
    # vLLM's own receivers wait for 60 s more than the abort timeout, whatever else is set.
    assert patience_s(abort_s, write_s) <= abort_s + 60
    assert last_start_s(abort_s, write_s) + write_s + 1 <= patience_s(abort_s, write_s)
    assert last_start_s(abort_s, 30) >= abort_s, "with the default a prompt may be ready until the abort timeout"


@pytest.mark.parametrize(
    ("setting", "size"), [("65535", 65_535), ("1", 1), ("", 1_024), ("100000", 1_024), ("0", 1_024), ("1e4", 1_024)]
)
def test_the_queue_has_the_size_that_mooncake_reads(setting: str, size: int) -> None:
    assert queued_pieces(setting) == size


def test_all_else_is_the_engines() -> None:
    assert Link().resting().get_rpc_port() == 700
