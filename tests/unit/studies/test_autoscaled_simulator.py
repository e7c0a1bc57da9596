"""Instances that come and go in a simulation, and a fleet that is sized by its backlog."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig, SimulationError
from pointsman_lab.workload.session_starts import Ramp, ramp_sessions
from pointsman_lab.workload.synthetic_trace import generate
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import InstanceState
from studies.autoscaling.autoscaled_simulator import AutoscaledSimulator, InstanceLife
from studies.autoscaling.horizontal_autoscaler import (
    AutoscalerSettings,
    RatePolicy,
    ScalingBehavior,
    ScalingRules,
)
from studies.autoscaling.outcome import TtftWindows, outcome_of
from studies.autoscaling.resizable_simulator import ResizableSimulator
from studies.autoscaling.signals import (
    AverageOverTime,
    Signal,
    backlog_seconds,
    kv_usage,
    requests_waiting,
)
from tests.support.lab_values import PLAIN, OneAtATime, ask

UP = ScalingRules(0, (RatePolicy("Percent", 100, 60),))
DOWN = ScalingRules(60, (RatePolicy("Pods", 1, 60),))


def scaler(least: int, most: int, target: float) -> AutoscalerSettings:
    return AutoscalerSettings(least, most, target, "Value", ScalingBehavior(UP, DOWN))


class Resized(ResizableSimulator):
    """A simulator with joins and leaves at set times; records what was decided on an instance while it did not answer."""

    def __init__(
        self, trace: list[TraceRequest], config: SimulationConfig, changes: list[tuple[float, str, str]]
    ) -> None:
        super().__init__(trace, config, 8)
        self.gone: list[tuple[str, float]] = []
        for at, what, name in changes:
            self._event_queue.schedule(at, self._change(what, name))

    def _change(self, what: str, name: str) -> Callable[[float], None]:
        def change(now: float) -> None:
            if what == "join" and name not in self._fleet.instances:
                self.join(name, now)
            elif what == "leave" and name in self.answering and len(self.answering) > 1:
                self.leave(name, now, lambda at: self.gone.append((name, at)))

        return change

    def _on_effect(self, router: str, effect: ev.Effect, now: float) -> None:
        if isinstance(effect, ev.Placed):
            assert effect.step.instance_id in self._fleet.instances
        super()._on_effect(router, effect, now)


def test_a_new_instance_is_cold_and_takes_new_sessions() -> None:
    turns = [ask("a", 1, 0.0, [1, 2], 128), ask("b", 1, 20.0, [3, 4], 128, output=30), ask("c", 1, 25.0, [1, 2], 128)]
    simulator = Resized(turns, SimulationConfig(instances=1, profile=PLAIN), [(10.0, "join", "new")])
    records = {record.session: record for record in simulator.run()}
    assert records["a"].instance == "i0"
    # Both instances are idle when b comes, so the first one gets it; c need not wait, though its prefix is on i0.
    assert {records["b"].instance, records["c"].instance} == {"i0", "new"}
    cold = next(record for record in (records["b"], records["c"]) if record.instance == "new")
    assert (cold.cached_tokens, cold.ttft_s) == pytest.approx((0, 2.28))
    simulator.router.check_invariants()


def test_an_instance_leaves_when_its_last_stream_has_ended() -> None:
    turns = [ask("a", 1, 0.0, [1], 100, output=20), ask("a", 2, 30.0, [1, 2], 130), ask("b", 1, 1.0, [5], 64, output=2)]
    changes = [(0.5, "join", "i1"), (5.0, "leave", "i0"), (5.0, "leave", "i1"), (40.0, "join", "i0")]
    simulator = Resized(turns, SimulationConfig(instances=1, profile=PLAIN), changes)
    records = {(record.session, record.turn): record for record in simulator.run()}
    assert all(record.ok for record in records.values())
    # 2 s of prefill and 19 tokens more. The other instance may not leave, because it is the last one that answers.
    assert (records["a", 1].instance, records["a", 1].e2e_s) == pytest.approx(("i0", 21.0))
    [gone] = simulator.gone
    assert gone == pytest.approx(("i0", 21.0))
    # The session's next turn goes to the remaining instance.
    assert (records["a", 2].instance, records["a", 2].cached_tokens) == ("i1", 0)


def test_a_name_that_is_taken_again_is_another_instance() -> None:
    turns = [ask("a", 1, 0.0, [1, 2], 128), ask("a", 2, 50.0, [1, 2], 140), ask("b", 1, 50.0, [7], 64)]
    changes = [(0.5, "join", "i1"), (20.0, "leave", "i0"), (30.0, "join", "i0"), (45.0, "leave", "i1")]
    simulator = Resized(turns, SimulationConfig(instances=1, profile=PLAIN), changes)
    records = {(record.session, record.turn): record for record in simulator.run()}
    assert simulator.gone == [("i0", 20.0), ("i1", 45.0)]
    record = simulator.router.instances.get("i0")
    assert record is not None
    assert (record.info.incarnation, record.state) == ("2", InstanceState.READY)
    # The blocks that the first instance had cached are lost with it.
    assert (records["a", 2].instance, records["a", 2].cached_tokens) == ("i0", 0)


NAMES = st.sampled_from(["i0", "i1", "i2", "x"])


# A prefix is to be fetched from an instance that leaves before the gateway hears of it.
SOURCE_LEAVES = (
    [
        (12.643351431615065, "join", "x"),
        (32.698448469782, "leave", "x"),
        (47.78083117678022, "join", "i2"),
        (0.0, "leave", "i1"),
        (71.9478778559453, "leave", "i0"),
    ],
    740,
    "foresight",
    {"placement_s": 0.5, "api_s": 0.5},
)


@example(*SOURCE_LEAVES)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 90), st.sampled_from(["join", "leave"]), NAMES), max_size=20),
    st.integers(1, 1_000),
    st.sampled_from(["unified", "foresight", "elastic", "round_robin"]),
    st.sampled_from([{}, {"placement_s": 0.5, "api_s": 0.5}, {"report_delay_s": 0.7, "report_loss": 0.2}]),
)
def test_every_request_is_answered_once_whoever_comes_and_goes(
    changes: list[tuple[float, str, str]], seed: int, policy: str, ways: dict[str, Any]
) -> None:
    requests = generate(12, 60.0, seed)
    settled = SimulationConfig(instances=2, policy=policy, seed=seed, **ways)
    simulator = Resized(requests, settled, changes)
    records = simulator.run()
    assert sorted((record.session, record.turn) for record in records) == sorted(
        (request.session, request.turn) for request in requests
    )
    assert all(record.ok for record in records)
    simulator.router.check_invariants()
    assert len(simulator.router.reservations) == 0
    # Instances that began to leave are gone, because nothing runs any more.
    assert {instance.info.instance_id for instance in simulator.router.instances.records()} == set(simulator.answering)


def test_held_requests_go_to_whoever_comes() -> None:
    turns = [ask("a", 1, 0.0, [1], 64, output=60), ask("b", 1, 1.0, [2], 64, output=1)]
    config = SimulationConfig(instances=1, profile=PLAIN, policy=OneAtATime())
    records = {record.session: record for record in Resized(turns, config, [(5.0, "join", "a0")]).run()}
    # The policy chooses the first instance by name, the new one, which is free.
    assert (records["b"].instance, records["b"].ttft_s) == pytest.approx(("a0", 4.0 + 1.64))


@pytest.mark.parametrize("wrong", [{"routers": 2}, {"pools": 2}])
def test_one_pool_of_one_router_is_resized(wrong: dict[str, Any]) -> None:
    with pytest.raises(SimulationError, match=next(iter(wrong))):
        ResizableSimulator([], SimulationConfig(**wrong), 8)


def scripted(*figures: float | None) -> Callable[..., float | None]:
    upcoming = iter(figures)
    return lambda *_: next(upcoming, figures[-1])


def idle_until(end_s: float) -> list[TraceRequest]:
    return [ask("a", 1, 0.0, [1], 64), ask("b", 1, end_s, [2], 64)]


def test_a_fleet_grows_after_the_startup_time_and_shrinks_from_the_end() -> None:
    # The signal is read at 15, 30, ... s and applied 7.5 s later.
    signal = scripted(1.0, 3.0, *[1.0] * 9, *[0.1] * 20)
    simulator = AutoscaledSimulator(
        idle_until(500.0), SimulationConfig(instances=2, profile=PLAIN), scaler(1, 4, 1.0), signal, 60.0
    )
    simulator.run()
    ups = [(sync.at, sync.after) for sync in simulator.syncs if sync.after != sync.before]
    # 3 x 2 are 6, of which 4 are allowed. From 180 s on all are too many: seen after the window of 60 s, one leaves each 60 s.
    assert ups == [(37.5, 4), (232.5, 3), (292.5, 2), (352.5, 1)]
    lives = {life.name: life for life in simulator.lives}
    assert (lives["i2"].wanted_at, lives["i2"].ready_at) == (37.5, 97.5)
    assert [lives[name].gone_at for name in ("i3", "i2", "i1", "i0")] == [232.5, 292.5, 352.5, None]
    assert sum(life.paid_s(500.0) for life in simulator.lives) == pytest.approx(500.0 + 352.5 + 255.0 + 195.0)


def test_an_instance_that_is_not_wanted_any_more_never_starts() -> None:
    quick = AutoscalerSettings(
        1, 4, 1.0, "Value", ScalingBehavior(UP, ScalingRules(0, (RatePolicy("Percent", 100, 15),)))
    )
    simulator = AutoscaledSimulator(
        idle_until(200.0), SimulationConfig(instances=2, profile=PLAIN), quick, scripted(2.0, 1.0, 0.5, 1.0), 60.0
    )
    simulator.run()
    # ceil(2 x 0.5) at 52.5 s, before the two instances that were wanted at 22.5 s would have answered.
    assert [(sync.at, sync.after) for sync in simulator.syncs if sync.after != sync.before] == [(22.5, 4), (52.5, 1)]
    assert [life for life in simulator.lives if life.wanted_at] == [
        InstanceLife("i2", 22.5, None, 52.5),
        InstanceLife("i3", 22.5, None, 52.5),
    ]


def test_no_figure_changes_nothing() -> None:
    simulator = AutoscaledSimulator(
        idle_until(100.0), SimulationConfig(instances=2, profile=PLAIN), scaler(1, 4, 1.0), scripted(None), 60.0
    )
    simulator.run()
    assert {(sync.figure, sync.after) for sync in simulator.syncs} == {(None, 2)}


def test_signals_are_the_routers_and_the_engines_figures() -> None:
    # A prefill of 29.6 s, and two that wait behind it.
    turns = [
        ask(name, 1, 0.0, [number * 10 + position for position in range(10)], 640) for number, name in enumerate("abc")
    ]
    seen: dict[str, list[float | None]] = {"backlog": [], "waiting": [], "kv": []}

    def reading(router: Any, pool: str, loads: Any, now: float) -> float | None:
        seen["backlog"].append(backlog_seconds(router, pool, loads, now))
        seen["waiting"].append(requests_waiting(router, pool, loads, now))
        seen["kv"].append(kv_usage(router, pool, loads, now))
        return None

    engine = EngineConfig(max_num_batched_tokens=640)
    one_by_one = SimulationConfig(instances=1, profile=PLAIN.slowed(4.0), engine=engine)
    AutoscaledSimulator(turns, one_by_one, scaler(1, 4, 1.0), reading, 60.0).run()
    assert seen["waiting"][:4] == [2.0, 1.0, 1.0, 0.0]
    assert seen["kv"][0] == pytest.approx(40 / 20_000)
    # Computed with the curve that the router has learned from the first prefill by the time the second one has begun.
    first, second, third, fourth = (figure or 0.0 for figure in seen["backlog"][:4])
    assert first > 0.0
    assert second > third > fourth
    assert 29.6 < second < 2 * 29.6
    averaged = AverageOverTime(scripted(None, 4.0, 2.0, None, 0.0), 2)
    nobody: Any = None
    assert [averaged(nobody, "", (), 0.0) for _ in range(5)] == [None, 4.0, 3.0, 3.0, 1.0]


# A ramp that is too steep for two instances from its middle on; a new one takes a minute to start.
RAMP = Ramp(before_s=200.0, rise_s=100.0, after_s=240.0, factor=3.0)


def on_the_ramp(signal: Signal, seed: int) -> tuple[AutoscaledSimulator, list[RequestRecord]]:
    sessions = ramp_sessions(generate(round(0.3 * RAMP.constant_s), RAMP.constant_s, seed), RAMP)
    config = SimulationConfig(instances=2, engine=EngineConfig(max_model_len=70_000), timing="think")
    simulator = AutoscaledSimulator(iter(sessions), config, scaler(2, 8, 0.5), signal, startup_s=60.0)
    return simulator, simulator.run_until(RAMP.end_s)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_backlog_decides_before_ttft_doubles(seed: int) -> None:
    without, records = on_the_ramp(lambda *_: 0.0, seed)
    before_s = TtftWindows.of(records).p90(60.0, RAMP.before_s)
    alone = outcome_of(without, records, RAMP, 60.0, before_s)
    by_backlog = outcome_of(*on_the_ramp(AverageOverTime(backlog_seconds, 4), seed), RAMP, 60.0, before_s)
    assert alone.decided_s is None
    assert alone.doubled_s is not None
    assert not alone.in_time
    # The fleet had not grown before, and the decision came before the time at which TTFT doubled without one.
    assert (by_backlog.early, by_backlog.paid_before) == (0, 1.0)
    assert by_backlog.decided_s is not None
    assert by_backlog.decided_s < alone.doubled_s
    assert by_backlog.in_time
    assert by_backlog.p90 < alone.p90 / 4


def windows(*seen: tuple[float, float]) -> TtftWindows:
    return TtftWindows([at for at, _ in seen], [ttft_s for _, ttft_s in seen])


def test_ttft_has_doubled_when_a_window_without_an_old_request_says_so_too() -> None:
    calm = [(float(at), 1.0) for at in range(0, 1_000, 10)]
    spike = windows(*calm[:50], *((500.0 + number / 10, 9.0) for number in range(8)), *calm[51:])
    # The spike is eight of the twenty values in a window, until it leaves the window.
    assert spike.worst_p90(0.0, 990.0) == 9.0
    assert spike.exceeded_at(2.0, 0.0, 990.0) is None
    risen = windows(*calm[:50], *((at, 3.0) for at, _ in calm[50:]))
    # More than a tenth of 12: the second one.
    assert risen.exceeded_at(2.0, 0.0, 990.0) == 510.0
    assert risen.exceeded_at(2.0, 0.0, 600.0) is None
    assert windows().exceeded_at(2.0, 0.0, 990.0) is None


def test_a_ramp_keeps_the_rate_before_and_multiplies_it_after() -> None:
    ramp = Ramp(before_s=100.0, rise_s=60.0, after_s=200.0, factor=3.0)
    assert ramp.constant_s == pytest.approx(100.0 + 120.0 + 600.0)
    assert [ramp.moment(at) for at in (0.0, 50.0, 100.0)] == [0.0, 50.0, 100.0]
    assert ramp.moment(220.0) == pytest.approx(160.0)
    assert ramp.moment(ramp.constant_s) == pytest.approx(ramp.end_s)
    # Half of the rise: 30 s at 1 to 2 times the rate.
    assert ramp.moment(100.0 + 30.0 * 1.5) == pytest.approx(130.0)
    requests = generate(30, ramp.constant_s, seed=1)
    sessions = ramp_sessions(requests, ramp)
    assert sorted((turn.session, turn.turn) for turns in sessions for turn in turns) == sorted(
        (request.session, request.turn) for request in requests
    )
    starts = [turns[0].timestamp_ms for turns in sessions]
    assert starts == sorted(starts)
