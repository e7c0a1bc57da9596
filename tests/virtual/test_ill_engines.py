"""Tests that seeds find what ill engines may cost too much: a mechanism is switched off, and an invariant must tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.request_state_machine import RequestStateMachine
from pointsman_gateway.core.streaming import parse_stream_end
from pointsman_router.core.apply_agent_reports import AgentReports
from pointsman_router.core.fleet_view_builder import FleetViewBuilder
from pointsman_router.core.instances.engine_life import EngineLife
from pointsman_router.core.instances.event_trust import EventTrust
from tests.support.virtual.engines import Illness, Traits
from tests.support.virtual.illnesses import falls_ill, hangs
from tests.support.virtual.run import Ill, ill_of, run
from tests.support.virtual.world import MODELS, World

Tell = Callable[[str], None]


async def one_hangs(world: World, tell: Tell) -> None:
    """Hang an engine, with requests on it."""
    hangs(world, world.engines["e0:1"], 24.0)
    tell("e0:1 hangs")
    await asyncio.sleep(16.0)


async def one_answers_404(world: World, tell: Tell) -> None:
    """Let an engine answer 404 to everything."""
    falls_ill(world, world.engines["e0:1"], Illness(status=404), 30.0)
    tell("e0:1 answers 404 to everything")
    await asyncio.sleep(22.0)


async def one_spoils_answers(world: World, tell: Tell) -> None:
    """Let an engine send garbage after some tokens of each answer, and end it in order."""
    falls_ill(world, world.engines["e0:1"], Illness(spoils="garbage"), 30.0)
    tell("e0:1 spoils each answer")
    await asyncio.sleep(22.0)


async def one_lies_about_its_load(world: World, tell: Tell) -> None:
    """Let an engine have absurd gauges, and another none, while they answer."""
    falls_ill(world, world.engines["e0:1"], Illness(load="absurd"), 20.0)
    falls_ill(world, world.engines["e1:1"], Illness(load="missing"), 20.0)
    tell("e0:1 and e1:1 have wrong gauges")
    await asyncio.sleep(20.0)


async def agents_die(world: World, tell: Tell) -> None:
    """Kill all agents, while engines answer."""
    for agent in world.agents.values():
        agent.kill()
    tell("all agents die")
    await asyncio.sleep(14.0)
    for agent in world.agents.values():
        agent.start()


async def one_is_alien(world: World, tell: Tell) -> None:
    """Break streams at two engines of a pool whose third has another identity."""
    world.engines["e2:1"].traits, world.engines["e4:1"].traits = Traits(), Traits(dialect=1)
    for name in ("e2:1", "e4:1"):
        world.engines[name].kill()
        world.restart(world.engines[name])
    await asyncio.sleep(3.0)
    for _ in range(6):
        for name in ("e0:1", "e2:1"):
            world.engines[name].kill()
            world.restart(world.engines[name])
            await asyncio.sleep(1.5)
    tell("two engines have restarted six times")


async def poison_comes(world: World, tell: Tell) -> None:
    """Send requests of which each engine dies that runs them."""
    for _ in range(6):
        await asyncio.sleep(2.5)
        await asyncio.wait([asyncio.create_task(world.gateways["g0"].ask_badly(MODELS[0], poison=True))])
    tell("six requests have killed engines")


async def clients_err(world: World, tell: Tell) -> None:
    """Send requests that every engine rejects, five at a time, beside what the engines answer."""
    for _ in range(60):
        asking = [world.gateways["g0"].ask_badly(MODELS[0], poison=False) for _ in range(5)]
        await asyncio.gather(*asking)
        await asyncio.sleep(0.2)
    tell("all are rejected")


async def no_events_come(world: World, tell: Tell) -> None:
    """Restart an engine that from now on announces KV events and sends none."""
    engine = world.engines["e0:1"]
    engine.traits = Traits(silent_events=True)
    engine.kill()
    world.restart(engine)
    tell("e0:1 sends no events")
    await asyncio.sleep(12.0)


TROUBLES = (
    one_hangs,
    one_answers_404,
    one_spoils_answers,
    one_lies_about_its_load,
    agents_die,
    one_is_alien,
    poison_comes,
    clients_err,
    no_events_come,
)


# ---- mechanisms that are switched off ----


def see_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overdue requests are no evidence. Gateways wait long, so hardly any request is lost."""
    monkeypatch.setattr(EngineLife, "overdue", lambda life, now: False)
    monkeypatch.setattr("tests.support.virtual.world.FIRST_BYTE_S", (60.0,))


def see_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost requests are no evidence. Gateways wait for less than what is overdue."""
    monkeypatch.setattr(EngineLife, "failed", lambda *_, **__: False)
    monkeypatch.setattr("tests.support.virtual.world.FIRST_BYTE_S", (6.0,))


def place_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is out gets requests as before."""
    monkeypatch.setattr(EngineLife, "open", lambda life, now: False)


def believe_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error answer is an answer, and none is compared."""
    monkeypatch.setattr(EngineLife, "doubted", property(lambda life: False))
    monkeypatch.setattr(
        EngineLife, "errored", lambda life, request_id, status, now, settings: life.answered(request_id, now)
    )


def take_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream in which an event is no JSON has ended well."""
    monkeypatch.setattr(parse_stream_end, "_NO_OBJECT", "")


def keep_no_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances leave the fleet with their agents, although they answer."""
    monkeypatch.setattr(AgentReports, "_keeps", lambda *_: "")


def blame_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three errors in a row put an engine out, whatever the others of its pool answer."""
    monkeypatch.setattr(EngineLife, "excused", lambda *_, **__: False)
    monkeypatch.setattr(EngineLife, "_unlikely", lambda life: life.errors >= 3)


def blame_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has broken two engines is sent to a third one."""
    monkeypatch.setattr(RequestStateMachine, "_alike", lambda *_: ())


def let_all_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any engine of a pool goes on with an answer."""
    monkeypatch.setattr(RequestContext, "may_go_on", lambda *_: True)
    monkeypatch.setattr(FleetViewBuilder, "_unfit", lambda *_: None)


def trust_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are trusted although answers contradict them."""
    monkeypatch.setattr(EventTrust, "_miss", EventTrust._agree)


@pytest.mark.parametrize(
    ("switch_off", "trouble", "found"),
    [
        (see_no_silence, one_hangs, "s, and it is in"),
        (see_no_failures, one_hangs, "requests, and is not out"),
        (place_on_all, one_hangs, "which is out, though"),
        (believe_errors, one_answers_404, "answers 404 to everything, and got"),
        (take_garbage, one_spoils_answers, "answers garbage to everything, and got"),
        (keep_no_instance, agents_die, "was refused, though"),
        (blame_engines, clients_err, "is well, and was put out"),
        (blame_no_request, poison_comes, "got a request that had killed"),
        (let_all_go_on, one_is_alien, "what the client has is another answer"),
        (trust_events, no_events_come, "are trusted, and none has been sent"),
    ],
)
def test_what_an_ill_engine_may_cost_is_checked(
    switch_off: Callable[[pytest.MonkeyPatch], None], trouble: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a few seeds must find that the mechanism is off."""
    switch_off(monkeypatch)
    failures: list[str] = []
    for seed in range(1, 6):
        failures.append(run(seed, trouble=trouble, policy="unified", ill=Ill.ALONE, check_each=0).failure)
        if found in failures[-1]:
            return
    pytest.fail(f"{found!r} is not among {failures}")


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_fleet_gets_over_it(trouble: Any) -> None:
    result = run(1, trouble=trouble, policy="unified", ill=Ill.ALONE, check_each=4)
    assert result.failure == ""
    assert result.answers[200] > 50


def test_some_seeds_have_ill_engines() -> None:
    drawn = [ill_of(seed) for seed in range(200)]
    assert [drawn.count(kind) for kind in (Ill.NONE, Ill.ALONE, Ill.AMONG)] == [150, 25, 25]
