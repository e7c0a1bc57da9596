"""What the router keeps of pools, instances and models that have left: nothing, after a while, however many come and go."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman_router.core import apply_agent_reports, shortlist
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.gone_pools import KEPT_S, GonePools
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import Load, Phase
from pointsman_router.core.prefill_curve import MeanWork, PrefillWork
from pointsman_router.core.prefix import exact_index
from pointsman_router.core.requests import request_table
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import RouterState
from tests.support.deep_size import reachable
from tests.support.router_values import join, place, request, state

HARDWARE = "gpu"


class Churn:
    """Pools that come, place, hold and lose requests, and leave, one after another."""

    def __init__(self, seed: int, instances: int, *, owns_all: bool) -> None:
        self.random = random.Random(seed)
        self.instances = instances
        self.owns_all = owns_all
        self.router = state(
            owns_all=owns_all,
            affinity_ttl_s=60.0,
            lost_instance_s=5.0,
            gateway_lease_s=5.0,
            place_lease_s=5.0,
            limits=SaturationLimits(max_requests=2),
            queue=QueueSettings(size=4, timeout_s=5.0),
        )
        self.now = 0.0
        self.stream = 0
        self.number = 0

    def tell(self, event: ev.Event) -> None:
        self.router.handle(event, self.now)

    def pool(self) -> None:
        """The life of one pool."""
        self.number += 1
        model, keys = f"m{self.number}", [self.number * 10 + key for key in range(4)]
        if not self.owns_all:
            self.tell(ev.PoolTaken(model, (), MeanWork(PrefillWork(1.0, 1.0), 5)))
        names = [f"i{self.number}-{number}" for number in range(self.instances)]
        streams = {}
        for name in names:
            self.stream += 1
            streams[name] = self.stream
            join(self.router, name, self.stream, keys, self.now, model=model, served_names=(), hardware=HARDWARE)
            self.tell(ev.LoadReported(self.stream, name, Load(self.now, running=1)))
        for number in range(2 * self.instances + 3):
            request_id = f"r{self.number}-{number}"
            asked = request(request_id, tokens=64 + number, keys=tuple(keys), model=model, session_id=request_id)
            self.tell(ev.PlaceRequested(asked, self.random.choice(["g", "h", ""])))
            self.now += 0.1
            if self.random.random() < 0.6:
                self.tell(ev.FirstToken(request_id))
            if self.random.random() < 0.4:
                timings = {"first_token": 100.0, "done": 600.0}
                self.tell(ev.Finished(request_id, "OK", cached_tokens=0, output_tokens=101, timings_ms=timings))
        for name in names:
            gone = ev.AgentGoodbye if self.random.random() < 0.5 else ev.AgentLost
            self.tell(gone(streams[name], name))
        if self.random.random() < 0.5:
            # A gateway reports a request whose instance has left.
            stream = ev.OpenStream(request(f"r{self.number}-0", tokens=64, model=model), names[0], Phase.PREFILL, 0)
            self.tell(ev.GatewayHello("g", (stream,)))
            self.tell(ev.StepDone(f"r{self.number}-0", 0, ok=False, error="gone"))
        self.tell(ev.GatewayHello("g"))
        self.tell(ev.GatewayHello("h"))
        if not self.owns_all:
            self.tell(ev.PoolLost(model))
        self.settle(60.0)

    def settle(self, seconds: float) -> None:
        for _ in range(6):
            self.now += seconds / 6
            # As the server's timer does.
            if (at := self.router.retry_at) is not None and at <= self.now:
                self.tell(ev.RetryDue())
            self.tell(ev.Tick())

    def objects(self) -> int:
        return sum(reachable(self.router).values())


@given(seed=st.integers(0, 1 << 16), instances=st.sampled_from([1, 2]), owns_all=st.booleans())
@settings(max_examples=4, deadline=None, phases=(Stage.explicit, Stage.generate))
def test_what_is_kept_stays_bounded_while_hundreds_of_pools_come_and_go(
    seed: int, instances: int, owns_all: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_table, "MAX_ENDED", 20)
        patch.setattr(apply_agent_reports, "KEEP_IDLE_S", 30.0)
        patch.setattr(exact_index, "MAX_CHANGES", 20)
        churn = Churn(seed, instances, owns_all=owns_all)
        sizes = []
        for _ in range(3):
            for _ in range(120):
                churn.pool()
            churn.settle(2 * KEPT_S)
            sizes.append(churn.objects())
        churn.router.check_invariants()
    # One object kept per pool would add 120. The remaining difference is which of the last ended requests are kept.
    assert max(sizes) - min(sizes) < 120, sizes


def test_a_large_pool_that_nobody_asks_for_gathers_a_bounded_part_of_what_happens_in_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shortlist, "MAX_CHANGES", 10)
    router = state()
    for number in range(70):
        join(router, f"large{number:02}", number, model="large", served_names=())
    place(router, request("r", tokens=10, model="large"))
    for number in range(100):
        stream = 1_000 + number
        join(router, f"i{number}", stream, model="small", served_names=())
        place(router, request(f"s{number}", tokens=10, model="small"))
        router.handle(ev.Finished(f"s{number}", "CANCELLED"), 0.0)
        router.handle(ev.AgentGoodbye(stream, f"i{number}"), 0.0)
    assert 0 < len(router.views._loads._changes) <= 20
    router.check_invariants()


def learned(router: RouterState) -> tuple[int, float]:
    """Samples of pool m's curve, and tokens of its mean work."""
    return router.prefill_observer.samples("m", HARDWARE), router.prefill_observer.mean_work("m").tokens


def test_what_was_learned_of_a_pool_outlives_a_restart_and_no_more() -> None:
    router = state()
    join(router, "a", 1, hardware=HARDWARE)
    place(router, request("r", tokens=100))
    router.handle(ev.FirstToken("r"), 1.0)
    router.handle(ev.Finished("r", "OK"), 1.0)
    assert learned(router) == (1, 100)
    router.handle(ev.AgentGoodbye(1, "a"), 2.0)
    router.handle(ev.Tick(), 2.0)
    join(router, "a", 2, now=2.0 + KEPT_S / 2, hardware=HARDWARE)
    router.handle(ev.Tick(), 2.0 + KEPT_S / 2)
    router.handle(ev.AgentGoodbye(2, "a"), 3.0 + KEPT_S / 2)
    for later in (3.0 + KEPT_S / 2, 2.5 + 1.5 * KEPT_S):
        router.handle(ev.Tick(), later)
        assert learned(router) == (1, 100)
    router.handle(ev.Tick(), 3.0 + 1.5 * KEPT_S)
    assert learned(router) == (0, 0)


def test_a_pool_with_open_requests_is_forgotten_when_they_have_ended() -> None:
    pools = GonePools()
    pools.left(["m"], 0.0)
    pools.left(["m"], 5.0)
    assert pools.due(lambda _: False, lambda _: True, KEPT_S) == []
    assert pools.due(lambda _: False, lambda _: False, KEPT_S - 1.0) == []
    assert pools.due(lambda _: False, lambda _: False, KEPT_S) == ["m"]
    assert len(pools) == 0
    pools.left(["m"], 0.0)
    assert pools.due(lambda _: True, lambda _: False, KEPT_S) == []
    assert len(pools) == 0
