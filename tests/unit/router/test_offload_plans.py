"""Plans of two steps in RouterState: reservations, owners, and answers on their way; and what is reported of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from pointsman.router.v1 import fleet_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_lab.rival_policies.registry import make_policy
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import (
    Candidate,
    Decision,
    FleetView,
    KvRole,
    KvTransfer,
    Phase,
    PlacementRequest,
    PolicyResult,
    Step,
    StepKind,
)
from pointsman_router.core.policy.base import Policy, offload
from pointsman_router.core.prefix.provisional_blocks import PROVISIONAL_S
from pointsman_router.core.router_state import RouterState, StateSettings
from pointsman_router.io.convert import operator_messages
from pointsman_router.io.telemetry.decision_log import LoggedDecision
from tests.support.router_values import hello, join, place, request, set_policy

PROMPT = list(range(2_000))
WINDOW_S = 10.0


def fleet(policy: str, *names: str, **settings: Any) -> RouterState:
    """Instances by name; the first holds the first half of PROMPT."""
    router = RouterState(make_policy(policy, settings), StateSettings(migration_window_s=WINDOW_S), router_id="t")
    for stream, name in enumerate(names, 1):
        held = prompt_keys(PROMPT[:1_008], "m") if stream == 1 else []
        join(router, name, stream, held, kv_capacity_tokens=5_000)
    return router


def migrating(**settings: Any) -> RouterState:
    """`a` decodes three requests, and is where unified leaves a session that has its cache there."""
    knobs = {"min_new_tokens": 1, "min_load_gap": 1, "overload_factor": 1e6, **settings}
    router = fleet("migrate", "a", "b", **knobs)
    for n in range(3):
        announced = ev.OpenStream(request(f"old{n}", tokens=500), "a", Phase.DECODE, 0)
        router.handle(ev.GatewayHello(f"g{n}", (announced,)), 0.0)
    router.affinity.assign("m", "/s", "a", 0.0)
    return router


def seen(router: RouterState, instance_id: str, now: float) -> Candidate:
    decision = router.explain(request("look", prompt=PROMPT), now)
    assert isinstance(decision, Decision)
    return next(candidate for candidate in decision.view.candidates if candidate.instance_id == instance_id)


def placed(router: RouterState, request_id: str, now: float) -> ev.Placed:
    answer = place(router, request(request_id, prompt=PROMPT, session_id="s"), now)
    assert isinstance(answer, ev.Placed)
    router.check_invariants()
    return answer


def test_without_a_gateway_a_plan_is_one_serve() -> None:
    """The Place call has one answer: without a gateway's stream the end of a prefill would never be reported, and its reservation
    would stay."""
    router = migrating()
    answer = place(router, request("r", prompt=PROMPT, session_id="s"), 1.0, gateway="")
    assert isinstance(answer, ev.Placed)
    assert (answer.step.kind, answer.last) == (StepKind.SERVE, True)
    assert not answer.step.kv_source
    assert not placed(router, "by a gateway", 1.0).last


def test_a_migration_reserves_on_the_host_first_and_then_on_the_target() -> None:
    router = migrating()
    first = placed(router, "r", 1.0)
    assert (first.step.instance_id, first.step.prefix_tokens, first.last) == ("a", 2_000, False)
    assert router.reservations.counters("a").pending_prefill_tokens == 992
    assert router.reservations.counters("b").num_requests == 0
    effects = router.handle(ev.StepDone("r", 0, True), 2.0)
    [second] = [effect for effect in effects if isinstance(effect, ev.Placed)]
    assert (second.step.instance_id, second.step.kv_source, second.last) == ("b", "a", True)
    assert router.reservations.counters("a").pending_prefill_tokens == 0
    counters = router.reservations.counters("b")
    assert (counters.num_requests, counters.pending_prefill_tokens) == (1, 0)
    router.handle(ev.Finished("r", "OK"), 3.0)
    assert router.reservations.counters("b").num_requests == 0
    router.check_invariants()


def next_step(router: RouterState, effects: list[ev.Effect]) -> ev.Placed:
    router.check_invariants()
    [answer] = [effect for effect in effects if isinstance(effect, ev.Placed)]
    return answer


@pytest.mark.parametrize("policy", ["adaptive_offload", "elastic", "migrate", "dynamo_kv", "llmd_default"])
def test_what_one_instance_must_compute_is_never_parted(policy: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "elastic": {"decider": "heuristic"},
        "dynamo_kv": {"disaggregate": True, "local_tokens": 0, "local_ratio": 0},
        "llmd_default": {"pd_threshold_tokens": 1},
    }
    for single_instance in (False, True):
        if policy == "migrate":
            router = migrating()
        else:
            heavy = {} if policy in ("dynamo_kv", "llmd_default") else {"heavy_new_tokens": 1}
            router = fleet(policy, "a", "b", **heavy, **settings.get(policy, {}))
            announced = ev.OpenStream(request("old", tokens=500), "a", Phase.DECODE, 0)
            router.handle(ev.GatewayHello("g", (announced,)), 0.0)
        asked = request("r", prompt=PROMPT, session_id="s", single_instance=single_instance)
        answer = place(router, asked, 1.0)
        assert isinstance(answer, ev.Placed)
        assert answer.last is single_instance
        assert (answer.step.kind is StepKind.SERVE) is single_instance
        router.check_invariants()


def test_after_a_failed_prefill_the_target_serves_the_whole_request() -> None:
    router = migrating()
    placed(router, "r", 1.0)
    effects = router.handle(ev.StepDone("r", 0, False, "deadline"), 2.0)
    second = next_step(router, effects)
    assert second.step == Step(StepKind.SERVE, "b", "colocated_after_failure")
    assert (second.step_index, second.last) == (1, True)
    [noted] = [effect for effect in effects if isinstance(effect, ev.DecisionNoted)]
    assert (noted.decision.decision_id, noted.decision.mode, noted.note) == (
        second.decision.decision_id,
        "OFFLOAD",
        "prefill_failed: deadline",
    )
    assert second.decision.notes[-1] == "prefill_failed: deadline"
    # Nothing came from elsewhere: the target has to compute what it has not cached.
    assert router.reservations.counters("b").pending_prefill_tokens == 2_000
    assert router.reservations.counters("a").num_requests == migrating().reservations.counters("a").num_requests


def test_after_a_failed_transfer_the_target_serves_the_whole_request_and_nothing_simpler_follows() -> None:
    router = migrating()
    placed(router, "r", 1.0)
    router.handle(ev.StepDone("r", 0, True), 2.0)
    third = next_step(router, router.handle(ev.StepDone("r", 1, False, "status 500"), 3.0))
    assert (third.step.instance_id, third.step.kv_source, third.step_index) == ("b", "", 2)
    assert third.decision.notes[-1] == "serve_failed: status 500"
    assert router.handle(ev.StepDone("r", 2, False, "again"), 4.0) == []
    assert router.handle(ev.StepDone("r", 1, False, "late"), 4.0) == []
    # The same request sent again, as after a broken session, gets the step in progress.
    again = place(router, request("r", prompt=PROMPT, session_id="s"), 5.0)
    assert isinstance(again, ev.Placed)
    assert again.step == third.step
    router.handle(ev.Finished("r", "OK"), 6.0)
    assert router.reservations.counters("b").num_requests == 0


def test_an_instance_that_fails_its_prefills_is_left_alone() -> None:
    router = fleet("adaptive_offload", "a", "b", heavy_new_tokens=1)
    for n, (fails, opened) in enumerate([(False, 0), (True, 0), (True, 0), (True, 1)]):
        answer = place(router, request(f"r{n}", prompt=PROMPT), 1.0)
        assert isinstance(answer, ev.Placed)
        assert (answer.step.kind, answer.step.instance_id) == (StepKind.PREFILL, "b")
        next_step(router, router.handle(ev.StepDone(f"r{n}", 0, False, "x", instance_failed=fails), 1.0))
        router.handle(ev.Finished(f"r{n}", "CANCELLED"), 1.0)
        record = router.instances.get("b")
        assert record is not None
        assert record.life.opened == opened
    after = place(router, request("after", prompt=PROMPT), 1.0)
    assert isinstance(after, ev.Placed)
    assert (after.step.kind, after.step.instance_id) == (StepKind.SERVE, "a")


@dataclass(frozen=True)
class Blind(Policy):
    """Plans a transfer from one instance to the other, whether it can be or not."""

    name: ClassVar[str] = "blind"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        prefill, decode = view.available()
        return offload(request, prefill, decode, "blind", "blind")


MOONCAKE = KvTransfer("MOONCAKE", "http://x:8998", cache_dtype="auto")


@pytest.mark.parametrize(
    ("p", "d", "can"),
    [
        ({"kv_transfer": MOONCAKE}, {"kv_transfer": MOONCAKE}, True),
        ({"kv_transfer": replace(MOONCAKE, role=KvRole.PRODUCER)}, {"kv_transfer": MOONCAKE}, True),
        ({"kv_transfer": MOONCAKE}, {"kv_transfer": replace(MOONCAKE, role=KvRole.CONSUMER)}, True),
        ({"kv_transfer": replace(MOONCAKE, role=KvRole.CONSUMER)}, {"kv_transfer": MOONCAKE}, False),
        ({"kv_transfer": None}, {"kv_transfer": MOONCAKE}, False),
        ({"kv_transfer": None}, {"kv_transfer": None}, False),
        ({"kv_transfer": KvTransfer("NIXL", cache_dtype="auto")}, {"kv_transfer": MOONCAKE}, False),
        ({"kv_transfer": replace(MOONCAKE, cache_dtype="fp8")}, {"kv_transfer": MOONCAKE}, False),
        ({"kv_transfer": MOONCAKE, "block_size": 32}, {"kv_transfer": MOONCAKE}, False),
    ],
)
def test_kv_goes_only_where_both_engines_let_it(p: dict[str, Any], d: dict[str, Any], can: bool) -> None:
    """In a mixed pool no policy is offered an instance that cannot prefill for the one that answers; a policy that plans it
    nevertheless gets one SERVE."""
    router = fleet("adaptive_offload", "d", "p", heavy_new_tokens=1)
    hello(router, "d", 1, **d)
    hello(router, "p", 2, **p)
    answer = placed(router, "r", 1.0)
    assert answer.decision.instance_id == "d"
    assert answer.decision.mode == ("OFFLOAD" if can else "COLOCATED")
    assert answer.decision.result.reason == ("heavy" if can else "no_other_instance")
    if not can:
        # Exchange the two, since views list instances by name and this policy prefills on the first.
        set_policy(router, Blind(), 1.0)
        hello(router, "d", 1, **p)
        hello(router, "p", 2, **d)
        blind = placed(router, "blind", 1.0)
        assert (blind.last, blind.step.kind, blind.step.kv_source) == (True, StepKind.SERVE, "")
        assert (blind.decision.result.reason, blind.decision.mode) == ("no_kv_transfer", "COLOCATED")


def test_a_decode_migrates_only_to_where_its_kv_can_go() -> None:
    router = migrating()
    hello(router, "b", 2, kv_transfer=replace(MOONCAKE, role=KvRole.PRODUCER), kv_capacity_tokens=5_000)
    answer = placed(router, "r", 1.0)
    assert (answer.last, answer.step.instance_id, answer.decision.result.reason) == (True, "a", "no_lighter_instance")


def test_answers_on_their_way_are_counted_for_a_while() -> None:
    router = migrating()
    assert seen(router, "b", 0.5).recent_migrations == 0
    placed(router, "r1", 1.0)
    placed(router, "r2", 2.0)
    assert (seen(router, "a", 2.0).recent_migrations, seen(router, "b", 2.0).recent_migrations) == (0, 2)
    # Asked again, the same placement: not another migration.
    placed(router, "r2", 2.0)
    assert seen(router, "b", 2.0).recent_migrations == 2
    assert seen(router, "b", 1.0 + WINDOW_S).recent_migrations == 1
    assert seen(router, "b", 2.0 + WINDOW_S).recent_migrations == 0
    router.handle(ev.Tick(), 1.0 + WINDOW_S)
    router.check_invariants()
    assert seen(router, "b", 1.0 + WINDOW_S).recent_migrations == 1
    router.handle(ev.PoolLost("m"), 3.0)
    assert seen(router, "b", 3.0).recent_migrations == 0


def test_what_is_served_where_it_prefills_is_no_migration() -> None:
    router = fleet("unified", "a", "b")
    where = placed(router, "r", 1.0).step.instance_id
    assert seen(router, where, 1.0).recent_migrations == 0


def test_a_burst_of_migrations_does_not_pile_up_on_one_target() -> None:
    # a has 3 requests and gets one more with each placement; b has none in its counters while they prefill on a.
    router = migrating(target_load_ratio=0.5)
    reasons = [placed(router, f"r{n}", 1.0).decision.result.reason for n in range(4)]
    # Load of a: 3, 4, 5, 6; of b, with migrations in progress: 0, 1, 2, 3, never above half of a's. One more on b exceeds it.
    assert reasons == ["migrate"] * 4
    router.migrations.record("b", 1.0)
    assert placed(router, "r9", 1.0).decision.result.reason == "no_lighter_instance"


def test_the_session_belongs_to_the_owner_that_the_ruling_names() -> None:
    for rotate, owner in ((False, "a"), (True, "b")):
        router = migrating(rotate_affinity=rotate)
        effects = router.handle(ev.PlaceRequested(request("r", prompt=PROMPT, session_id="s"), "g"), 1.0)
        assert ev.SessionOwnerSet("/s", owner, "m") in effects
        assert router.affinity.owner("m", "/s", 1.0) == owner


def test_elastic_offloads_only_while_the_cache_owner_decodes() -> None:
    router = fleet("elastic", "d", "p", heavy_new_tokens=900, throughput=100, transfer_token_s=0, overload_factor=1e6)
    idle = router.explain(request("x", prompt=PROMPT, session_id="s"), 0.0)
    assert isinstance(idle, Decision)
    assert (idle.instance_id, idle.mode, idle.result.reason) == ("d", "COLOCATED", "decode_idle")
    first = placed(router, "r1", 0.0)
    assert (first.step.instance_id, first.last) == ("d", True)
    # The engine's events do not say that r1's prompt is cached, and its provisional keys are gone when r2 comes.
    router.handle(ev.FirstToken("r1"), 1.0)
    second = placed(router, "r2", 2.0 + PROVISIONAL_S)
    assert (second.step.instance_id, second.decision.instance_id, second.last) == ("p", "d", False)
    assert second.decision.result.reason == "prefill_idle_decode_busy"
    # P is busy now: to wait there for another 2,000 tokens would take longer than the transfer gains.
    assert placed(router, "r3", 2.0 + PROVISIONAL_S).decision.result.reason == "prefill_overloaded"
    assert router.affinity.owner("m", "/s", 4.0) == "d"


def test_the_wire_tells_figures_next_owner_and_the_new_features() -> None:
    router = migrating()
    placed(router, "r0", 1.0)
    decision = placed(router, "r1", 2.0).decision
    wire = operator_messages.decision_to_wire(router, LoggedDecision(decision, 0.0, 0.0))
    assert dict(wire.figures) == {"host_load": 4.0, "target_load": 1.0}
    assert (wire.next_owner, wire.mode, wire.reason) == ("a", fleet_pb2.PLACEMENT_MODE_OFFLOAD, "migrate")
    assert [step.instance.instance_id for step in wire.steps] == ["a", "b"]
    assert wire.policy.settings["picker"] == "rotation"
    assert wire.policy.settings["rotate_affinity"] is False
    figures = {
        candidate.instance_id: (candidate.recent_migrations, candidate.kv_capacity_tokens)
        for candidate in wire.candidates
    }
    assert figures == {"a": (0, 5_000), "b": (1, 5_000)}
