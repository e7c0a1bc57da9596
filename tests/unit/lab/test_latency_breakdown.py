"""Where requests' time went, from what the router reports and from the gateway's log."""

from __future__ import annotations

import pytest

from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_lab.live.latency_breakdown import break_down, parts
from pointsman_lab.report.request_record import RequestRecord


def decided(name: str, at_s: float) -> fleet_pb2.Decision:
    steps = [
        placement_pb2.Step(index=0, reason="offload", instance=placement_pb2.InstanceRef(instance_id="p")),
        placement_pb2.Step(index=1, reason="session_affinity", instance=placement_pb2.InstanceRef(instance_id="d")),
    ]
    timings = placement_pb2.Timings(placed_ms=250, sent_ms=900, first_token_ms=1_000, done_ms=3_000)
    finished = placement_pb2.Finished(cached_tokens=0, timings=timings)
    decision = fleet_pb2.Decision(
        decision_id=name,
        mode=fleet_pb2.PLACEMENT_MODE_OFFLOAD,
        steps=steps,
        outcome=fleet_pb2.DECISION_OUTCOME_OK,
        finished=finished,
    )
    decision.time.FromNanoseconds(int(at_s * 1e9))
    decision.held.FromMilliseconds(200)
    return decision


RECORDS = [RequestRecord(session="s", turn=turn, decision=f"d-{turn}", status=200) for turn in (1, 2, 3)]


def test_the_routers_timings_become_moments() -> None:
    (row,) = break_down(RECORDS[:1], {"d-1": decided("d-1", 1_000.2)}, {})
    assert (row.instances, row.rule, row.mode) == (["p", "d"], "session_affinity", "OFFLOAD")
    # A time that the engine did not report is not 0.
    assert (row.cached_tokens, row.prompt_tokens) == (0, None)
    assert (row.t_recv, row.t_placed, row.t_sent) == pytest.approx((1_000.0, 1_000.25, 1_000.9))
    assert row.t_prefill_sent is row.t_prefill_done is None


def test_what_earlier_steps_computed_is_no_cache_hit() -> None:
    decision = decided("d-1", 1_000.2)
    decision.finished.cached_tokens, decision.finished.own_cached_tokens = 960, 640
    (row,) = break_down(RECORDS[:1], {"d-1": decision}, {})
    assert row.cached_tokens == 320


def test_the_gateways_log_knows_more_and_decisions_that_are_gone_have_no_row() -> None:
    line = {"t_recv": 50.0, "t_placed": 50.3, "t_prefill_sent": 50.3, "t_prefill_done": 50.7, "fallback": "late"}
    decisions = {"d-1": decided("d-1", 1_000.2), "d-3": decided("d-3", 2_000.2)}
    rows = break_down(RECORDS, decisions, {"d-1": line})
    assert [row.turn for row in rows] == [1, 3]
    assert (rows[0].t_recv, rows[0].t_prefill_done, rows[0].fallback) == (50.0, 50.7, "late")
    found = parts([rows[1]])
    assert found["placing"] == pytest.approx({"p50": 0.25, "p90": 0.25, "p99": 0.25, "mean": 0.25, "count": 1})
    assert found["prefill_elsewhere"] is None
    shares = parts(rows)["prefill_elsewhere"]
    assert shares is not None
    assert (shares["mean"], shares["count"]) == pytest.approx((0.4, 1))
