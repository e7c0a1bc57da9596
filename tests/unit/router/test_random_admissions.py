"""A Hypothesis machine: any order of events while sessions are admitted, parked, let in and refused."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.admission.session_admission import AdmissionSettings
from pointsman_router.core.placement_types import InstanceInfo, PlacementRequest
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.hold_queue import HeldRequest
from tests.support.router_values import request
from tests.unit.router.test_random_events import MACHINE, StateMachine


class AdmittedStateMachine(StateMachine):
    """As StateMachine, in a fleet whose caches are always too small, while sessions are admitted in turn and not. Every parked
    request is answered exactly once and by its bound, unless it ends, or its gateway's stream does. No new session passes one
    like it that came first."""

    admission: ClassVar[AdmissionSettings] = AdmissionSettings(True, interactive_s=2.0, standard_s=6.0, batch_s=12.0)

    @initialize(joined=st.just(True))
    def begin(self, joined: bool) -> None:
        """With a fleet that is up, and a first storm."""
        super().begin(joined)
        self.storm(0, 6, 800)

    def __init__(self) -> None:
        self.applies = True
        super().__init__()
        self.router.admission.applies = lambda pool, now: self.applies

    def info(self, name: str, **changes: Any) -> InstanceInfo:
        return super().info(name, **{"kv_capacity_tokens": 800, **changes})

    def handle(self, event: ev.Event) -> list[ev.Effect]:
        for pool in "mn":
            # As when an earlier owner had parked a request: the pool is armed if its capacity is known.
            self.router.admission.was_parked(pool, self.now)
        parked = {held.request.request_id: held for held in self.router.parked_requests.queue}
        # A held request is admitted: who is parked later, even with an older age, came too late to go before it.
        held = self.router.held_requests.queue
        before = {known.request_id for known in self.router.reservations} | {
            waiting.request.request_id for waiting in held
        }
        effects = super().handle(event)
        placed = [effect.decision.request for effect in effects if isinstance(effect, ev.Placed)]
        for asked in (*placed, *(waiting.request for waiting in held)):
            if asked.request_id not in before:
                self.passes_nobody_like_it(asked, parked)
        return effects

    def passes_nobody_like_it(self, admitted: PlacementRequest, parked: dict[str, HeldRequest]) -> None:
        """When a session is admitted, nobody of its pool, class and tenant that came first, with a session no larger than its
        own, still waits to be let in. (Small sessions and those under way never wait.)"""
        record, before = admitted.admitted, parked.get(admitted.request_id)
        if record is None or record.verdict.reason not in ("fits", "not_armed", "capacity_unknown"):
            return
        size, since = (before.new_tokens, before.since) if before else (record.view.size, self.now - admitted.parked_s)
        for held in self.router.parked_requests.queue:
            request = held.request
            alike = (request.model, request.tenant, request.priority) == (
                admitted.model,
                admitted.tenant,
                admitted.priority,
            )
            if alike and held.since < since and held.request.request_id in parked:
                assert held.new_tokens > size, (held, admitted)

    @rule(applies=st.booleans())
    def admission_is_switched(self, applies: bool) -> None:
        """As when the policy is set, or `auto` takes another one."""
        self.applies = applies
        self.handle(ev.PolicySet(self.router.policy))

    @rule(
        number=st.integers(0, 40),
        gateway=st.sampled_from(["g1", "g2"]),
        tokens=st.integers(0, 1_500),
        parent=st.integers(0, 40),
        continues=st.booleans(),
        priority=st.sampled_from(Priority),
        parked_s=st.sampled_from([0.0, 0.0, 3.0]),
        parkable=st.booleans(),
    )
    def begin_session(
        self,
        number: int,
        gateway: str,
        tokens: int,
        parent: int,
        continues: bool,
        parked_s: float,
        parkable: bool,
        priority: Priority = Priority.STANDARD,
    ) -> None:
        self.stream += 1
        asked = request(
            f"a{self.stream}",
            tokens=tokens,
            keys=tuple(range(100 * number, 100 * number + tokens // 16)),
            session_id=f"n{number}",
            parent=f"/n{parent}" if parent <= 40 else "",
            continues=continues and not number % 4,
            priority=priority,
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
        for held in self.router.parked_requests.queue:
            assert held.answer_by - held.asked_at <= self.admission.bound_s(held.request.priority) + 1e-9

    @invariant()
    def what_is_open_is_counted(self) -> None:
        for name, pool in self.router.admission.pools.items():
            counted = {session.name: session.open for session in pool.ledger.sessions.values() if session.open}
            # A reservation that a new owner of the pool took from the store is counted when its gateway announces it.
            placed = [known for known in self.router.requests if known.reservation is not None and known.counted]
            assert counted == Counter(known.counted for known in placed if known.pool == name)

    def teardown(self) -> None:
        super().teardown()
        assert not len(self.router.parked_requests.queue)
        for pool in self.router.admission.pools.values():
            assert not any(session.open for session in pool.ledger.sessions.values())


AdmittedStateMachine.TestCase.settings = settings(MACHINE, max_examples=50)
TestAdmittedState = AdmittedStateMachine.TestCase


def test_an_admitted_request_that_was_held_may_pass_one_that_was_parked_later_with_an_older_age() -> None:
    """Found by the machine: a session that was refused kept its age, and was parked again after another one was let in."""
    machine = AdmittedStateMachine()
    machine.begin(joined=True)
    machine.time_is_due()  # n2 to n5 are refused, and keep their age
    machine.agent_ends("b", goodbye=False)
    machine.agent_ends("c", goodbye=True)
    machine.answer(0, "STOP", 2)
    machine.answer(0, "STOP", 1)
    machine.storm(28, 4, 415)
    machine.begin_session(0, "g1", 1_272, 25, False, 0.0, False, Priority.BATCH)
    machine.admission_is_switched(applies=False)  # n30 and n31 are let in, and held
    machine.admission_is_switched(applies=True)
    held = {waiting.request.session_id for waiting in machine.router.held_requests.queue}
    machine.begin_session(2, "g1", 400, 2, False, 0.0, False)
    [again] = [waiting for waiting in machine.router.parked_requests.queue if waiting.request.session_id == "n2"]
    assert again.since < again.asked_at
    machine.answer(0, "STOP", 0)
    machine.answer(0, "STOP", 0)
    assert len(held - {waiting.request.session_id for waiting in machine.router.held_requests.queue}) == 1
