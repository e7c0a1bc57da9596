"""Draws of sessions: sustained arrivals and bursts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pointsman_lab.workload.session_starts import Arrivals, Session, draw_sessions
from pointsman_lab.workload.traces import TraceRequest

# 10 sessions of two turns, one start every 10 s: 10 / 90 per s.
TRACE = [
    TraceRequest(
        timestamp_ms=session * 10_000 + turn * 1_000,
        session_id=session,
        turn=turn + 1,
        input_length=32 * (turn + 1),
        output_length=1,
        hash_ids=tuple(range(session * 10, session * 10 + turn + 1)),
        block_size=32,
    )
    for session in range(10)
    for turn in range(2)
]
TRACE_RATE = 10 / 90


def starts_s(drawn: list[Session]) -> list[float]:
    return [turns[0].timestamp_ms / 1e3 for turns in drawn]


def per_s(starts: list[float], begin: float, end: float) -> float:
    return sum(begin <= start < end for start in starts) / (end - begin)


def test_a_burst_has_its_own_rate_between_two_spans_of_the_common_rate() -> None:
    arrivals = Arrivals("burst", rate=2, burst_rate=6, before_burst_s=6_000, burst_s=3_000, after_burst_s=9_000)
    starts = starts_s(draw_sessions(TRACE, arrivals, 1))
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert starts[-1] < 18_000
    assert per_s(starts, 0, 6_000) == pytest.approx(2 * TRACE_RATE, rel=0.1)
    assert per_s(starts, 6_000, 9_000) == pytest.approx(6 * TRACE_RATE, rel=0.1)
    assert per_s(starts, 9_000, 18_000) == pytest.approx(2 * TRACE_RATE, rel=0.1)


def test_a_burst_lasts_ten_minutes_after_ten_and_before_twenty_unless_told_otherwise() -> None:
    assert Arrivals("burst", rate=0.6, burst_rate=1.5).phases == ((600, 0.6), (600, 1.5), (1200, 0.6))


def test_sustained_arrivals_last_as_long_as_wanted() -> None:
    starts = starts_s(draw_sessions(TRACE, Arrivals("sustained", rate=1.5, sustained_s=20_000), 1))
    assert 19_500 < starts[-1] < 20_000
    assert len(starts) == pytest.approx(20_000 * 1.5 * TRACE_RATE, rel=0.1)


@pytest.mark.parametrize("sign", [1, -1])
def test_every_session_comes_equally_often_and_never_with_blocks_of_another_time(sign: int) -> None:
    trace = [replace(turn, hash_ids=tuple(sign * (block + 1) for block in turn.hash_ids)) for turn in TRACE]
    drawn = draw_sessions(trace, Arrivals("sustained", sustained_s=2_000), 3)
    assert len({turns[0].session for turns in drawn}) == len(drawn)
    owner: dict[int, str] = {}
    for turns in drawn:
        for turn in turns:
            assert turn.hash_ids == turns[-1].hash_ids[: len(turn.hash_ids)]
            assert turn.timestamp_ms - turns[0].timestamp_ms == pytest.approx((turn.turn - 1) * 1_000)
            for block in turn.hash_ids:
                assert owner.setdefault(block, turns[0].session) == turns[0].session
    recorded = [turns[0].session.partition("+")[0] for turns in drawn]
    for begin in range(0, len(recorded) - 10, 10):
        assert len(set(recorded[begin : begin + 10])) == 10


def test_a_seed_has_one_draw_and_the_same_order_of_sessions_at_every_rate() -> None:
    slow, again, fast = (
        draw_sessions(TRACE, Arrivals("sustained", rate=rate, sustained_s=900), 5) for rate in (1, 1, 3)
    )
    assert slow == again
    assert [turns[0].session for turns in fast[: len(slow)]] == [turns[0].session for turns in slow]
    assert starts_s(fast[: len(slow)]) == pytest.approx([start / 3 for start in starts_s(slow)])
    assert draw_sessions(TRACE, Arrivals("sustained", sustained_s=900), 6) != slow


@pytest.mark.parametrize("name", ["burst_rate", "sustained_s", "before_burst_s", "burst_s", "after_burst_s"])
def test_arrivals_name_the_value_that_is_out_of_range(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: -1 is"):
        Arrivals("burst", **{name: -1.0})


def test_a_trace_whose_sessions_start_at_one_time_has_no_rate_to_draw_by() -> None:
    with pytest.raises(ValueError, match="starts: burst needs a trace"):
        draw_sessions(TRACE[:2], Arrivals("burst"), 0)
