"""Clients of a simulation: sub-agents, sessions without names, tenants, and clients that are refused or lose patience."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.clients import Clients, Turn
from pointsman_lab.simulation.config import SimulationConfig, SimulationError, Tenant
from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_lab.simulation.simulator import Simulator
from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.subagents import SubagentRequest, Subagents, with_subagents
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.priority import Priority
from pointsman_router.core.requests.hold_queue import QueueSettings
from pointsman_router.core.router_state import StateSettings
from tests.support.lab_values import PLAIN, OneAtATime, ask


def turns_of(session: str, count: int, at_s: float = 0.0, think_s: float = 0.0) -> Session:
    return [
        ask(session, turn + 1, at_s + turn, [hash(session) % 1000 + at for at in range(turn + 1)], 100, think_s=think_s)
        for turn in range(count)
    ]


def sent(
    sessions: list[Session], answer_s: float = 1.0, failed: tuple[str, ...] = (), **asked: Any
) -> list[tuple[float, Turn]]:
    """Let clients send `sessions`; each request is answered after `answer_s`. Return what they sent."""
    queue = EventQueue()
    sent_turns: list[tuple[float, Turn]] = []

    def answer(turn: Turn, now: float) -> None:
        sent_turns.append((now, turn))
        name = f"{turn.request.session}#{turn.request.turn}"
        queue.schedule(now + answer_s, lambda end: clients.answered(turn, end, ok=name not in failed))

    clients = Clients(iter(sessions), SimulationConfig(timing="think", **asked), ["a", "b"], queue, answer)
    clients.start()
    while not clients.done:
        queue.run_next()
    return sent_turns


def names(sent_turns: list[tuple[float, Turn]]) -> list[tuple[float, str]]:
    return [(now, f"{turn.request.session}#{turn.request.turn}") for now, turn in sent_turns]


def with_parent(turns: Session, parent: str, turn: int) -> Session:
    first = turns[0]
    fields = {name: getattr(first, name) for name in first.__struct_fields__}
    return [SubagentRequest(**fields, parent=parent, parent_turn=turn), *turns[1:]]


def test_a_parents_next_turn_waits_for_its_subagents() -> None:
    parent, child, other = turns_of("p", 2, think_s=5.0), turns_of("c", 3), turns_of("d", 1)
    sent_turns = sent([parent, with_parent(child, "p", 1), with_parent(other, "p", 1), turns_of("q", 1, at_s=2.5)])
    assert names(sent_turns) == [(0, "p#1"), (1, "c#1"), (1, "d#1"), (2, "c#2"), (2.5, "q#1"), (3, "c#3"), (9, "p#2")]
    assert {turn.request.session: turn.parent for _, turn in sent_turns} == {"p": "", "c": "p", "d": "p", "q": ""}
    # Sub-agents are in their parent's pool and do not count when sessions are assigned to pools in turn.
    assert {turn.request.session: turn.pool for _, turn in sent_turns} == {"p": "a", "c": "a", "d": "a", "q": "b"}


def test_the_cap_counts_sessions_and_not_their_subagents() -> None:
    family = [with_parent(turns_of(f"c{number}", 1), "p", 1) for number in range(3)]
    sessions = [turns_of("p", 2), *family, *(turns_of(name, 1) for name in "qrst")]
    found = {name: now for now, name in names(sent(sessions, answer_s=10.0, max_sessions=2))}
    assert [found[f"{name}#1"] for name in "qrst"] == [0.0, 10.0, 20.0, 30.0], "beside p, whose turns take 30 s"


def test_a_session_that_gives_up_ends_with_its_failed_turn_and_starts_no_subagents() -> None:
    sessions = [turns_of("p", 3), with_parent(turns_of("c", 1), "p", 2), turns_of("q", 2, at_s=9.0)]
    assert names(sent(sessions, failed=("p#1", "q#2"), gives_up=True)) == [(0, "p#1"), (9, "q#1"), (10, "q#2")]
    assert len(sent(sessions, failed=("p#1",))) == 6


def test_a_parent_goes_on_when_its_subagent_gave_up() -> None:
    sessions = [turns_of("p", 2), with_parent(turns_of("c", 2), "p", 1)]
    assert names(sent(sessions, failed=("c#1",), gives_up=True)) == [(0, "p#1"), (1, "c#1"), (2, "p#2")]


def test_unnamed_sessions_and_tenants_are_drawn_by_their_shares_and_alike_in_every_cell() -> None:
    sessions = [turns_of(f"s{number}", 2, at_s=number) for number in range(400)]
    tenants = (Tenant("big", 3.0, Priority.BATCH, sessions=3), Tenant("small", sessions=1))
    sent_turns = sent(sessions, unnamed_share=0.25, tenants=tenants)
    again = sent(sessions, answer_s=7.0, unnamed_share=0.25, tenants=tenants)
    by_session = {turn.request.session: (turn.named, turn.tenant.name) for _, turn in sent_turns}
    assert by_session == {turn.request.session: (turn.named, turn.tenant.name) for _, turn in again}
    assert sum(not named for named, _ in by_session.values()) == pytest.approx(100, rel=0.25)
    assert sum(name == "big" for _, name in by_session.values()) == pytest.approx(300, rel=0.1)
    assert len({(turn.request.session, turn.named, turn.tenant) for _, turn in sent_turns}) == 400


def test_subagents_share_the_beginning_of_their_parents_prompt() -> None:
    sessions = [turns_of(f"s{number}", 3, at_s=number) for number in range(200)]
    drawn = with_subagents(sessions, Subagents(0.5, most=2, shared_tokens=64), 1)
    assert drawn == with_subagents(sessions, Subagents(0.5, most=2, shared_tokens=64), 1)
    assert [turns[0].session for turns in drawn] == [turns[0].session for turns in sessions]
    children = [turns for turns in drawn if isinstance(turns[0], SubagentRequest)]
    assert 60 < len(children) < 110
    by_name = {turns[0].session: turns for turns in drawn}
    for turns in children:
        first = turns[0]
        assert isinstance(first, SubagentRequest)
        parent = by_name[first.parent][0]
        assert {turn.hash_ids[0] for turn in turns} == {parent.hash_ids[0]}
        assert not isinstance(parent, SubagentRequest)
        assert first.parent_turn < 3
    assert with_subagents(sessions, Subagents(), 1) == sessions


def simulate(requests: Session, **asked: Any) -> dict[tuple[str, int], RequestRecord]:
    simulator = Simulator(requests, SimulationConfig(instances=1, profile=PLAIN, **asked))
    records = simulator.run()
    simulator.router.check_invariants()
    assert len(simulator.router.reservations) == 0
    return {(record.session, record.turn): record for record in records}


def test_a_client_without_patience_disconnects_wherever_its_request_is() -> None:
    # a computes until 2 s; b is held, c is refused and waits to retry.
    requests = [ask("a", 1, 0.0, [1], 100), ask("b", 1, 0.1, [2], 100), ask("c", 1, 0.2, [3], 100)]
    router = StateSettings(queue=QueueSettings(size=1))
    records = simulate(requests, policy=OneAtATime(), leaves_after_s=1.5, router=router)
    assert {name: record.status for (name, _), record in records.items()} == {"a": 499, "b": 499, "c": 499}
    assert {name: record.e2e_s for (name, _), record in records.items()} == pytest.approx(
        {"a": 1.5, "b": 1.5, "c": 1.5}
    )
    patient = simulate(requests[:1], leaves_after_s=2.5)
    assert patient["a", 1].status == 200


def test_a_session_that_gives_up_sends_no_turn_after_a_refusal() -> None:
    requests = [ask("a", 1, 0.0, [1], 100, output=40), ask("b", 1, 0.1, [2], 100), ask("b", 2, 0.2, [2, 3], 130)]
    router = StateSettings(limits=SaturationLimits(1, 0.0), queue=QueueSettings(size=0))
    records = simulate(requests, retries=0, gives_up=True, router=router)
    assert sorted(records) == [("a", 1), ("b", 1)]
    assert records["b", 1].status == 429


@pytest.mark.parametrize("wrong", [{"unnamed_share": 1.5}, {"leaves_after_s": 0.0}, {"tenants": ()}])
def test_impossible_clients_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SimulationError, match=next(iter(wrong))):
        SimulationConfig(**wrong)
    with pytest.raises(ValueError, match="share"):
        Subagents(share=2.0)
