"""A Hypothesis machine: any order of events while sessions are admitted, parked, let in and refused."""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.placement_types import InstanceInfo
from tests.support.router_values import request
from tests.unit.router.test_random_events import MACHINE, StateMachine


class AdmittedStateMachine(StateMachine):
    """As StateMachine, in a fleet whose caches are always too small. Every parked request is answered exactly once and by its
    bound, unless it ends, or its gateway's stream does."""

    admission: ClassVar[AdmissionSettings] = AdmissionSettings(True, interactive_s=2.0, standard_s=6.0, batch_s=12.0)

    @initialize(joined=st.just(True))
    def begin(self, joined: bool) -> None:
        """With a fleet that is up, and a first storm."""
        super().begin(joined)
        self.storm(0, 6, 800)

    def info(self, name: str, **changes: Any) -> InstanceInfo:
        return super().info(name, **{"kv_capacity_tokens": 800, **changes})

    def handle(self, event: ev.Event) -> list[ev.Effect]:
        for pool in "mn":
            # As when an earlier owner had parked a request: the pool is armed if its capacity is known.
            self.router.admission.was_parked(pool, self.now)
        return super().handle(event)

    @rule(
        number=st.integers(0, 40),
        gateway=st.sampled_from(["g1", "g2"]),
        tokens=st.integers(0, 1_500),
        parent=st.integers(0, 40),
        continues=st.booleans(),
        parked_s=st.sampled_from([0.0, 0.0, 3.0]),
        parkable=st.booleans(),
    )
    def begin_session(
        self, number: int, gateway: str, tokens: int, parent: int, continues: bool, parked_s: float, parkable: bool
    ) -> None:
        self.stream += 1
        asked = request(
            f"a{self.stream}",
            tokens=tokens,
            keys=tuple(range(100 * number, 100 * number + tokens // 16)),
            session_id=f"n{number}",
            parent=f"/n{parent}",
            continues=continues and not number % 4,
            parked_s=parked_s,
            parkable=parkable,
            deadline_s=4.0,
        )
        self.handle(ev.PlaceRequested(asked, gateway))

    @rule(at=st.integers(0, 30), reason=st.sampled_from(["STOP", "TOOL_CALLS"]), output=st.integers(0, 300))
    def answer(self, at: int, reason: str, output: int) -> None:
        if opened := list(self.router.reservations):
            request_id = opened[at % len(opened)].request_id
            self.handle(ev.Finished(request_id, "OK", output_tokens=output, finish_reason=reason))

    @rule(first=st.integers(0, 40), count=st.integers(1, 6), tokens=st.integers(100, 1_500))
    def storm(self, first: int, count: int, tokens: int) -> None:
        for number in range(first, first + count):
            self.begin_session(number, "g1", tokens, 99, False, 0.0, True)

    @rule()
    def time_is_due(self) -> None:
        if (at := self.router.retry_at) is not None:
            self.now = max(self.now, at)
            self.handle(ev.RetryDue())

    @invariant()
    def nobody_is_parked_beyond_the_bound(self) -> None:
        for held in self.router.parking.queue:
            assert held.answer_by - held.asked_at <= self.admission.bound_s(held.request.priority) + 1e-9

    @invariant()
    def what_is_open_is_counted(self) -> None:
        for name, pool in self.router.admission.pools.items():
            counted = sum(session.open for session in pool.ledger.sessions.values())
            # A reservation that a new owner of the pool took from the store is counted when its gateway announces it.
            assert counted <= len(self.router.reservations.of_pool(name))

    def teardown(self) -> None:
        super().teardown()
        assert not len(self.router.parking.queue)
        for pool in self.router.admission.pools.values():
            assert not any(session.open for session in pool.ledger.sessions.values())


AdmittedStateMachine.TestCase.settings = settings(MACHINE, max_examples=50)
TestAdmittedState = AdmittedStateMachine.TestCase
