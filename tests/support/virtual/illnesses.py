"""The illnesses of a virtual fleet's engines: each befalls one engine, and leaves another of its pool well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.virtual.engines import CONTEXT, Engine, Illness
from tests.support.virtual.faults import Fault, agent_dies, metrics_fail
from tests.support.virtual.world import World

# What an ill engine may answer to everything: an error, or a page. Clients may get it, too, until the engine is doubted.
ANSWERED = (200, 302, 400, 401, 404, 422, 429, 500, 501, 503)
STATUSES_OF_ILL = set(ANSWERED)
# How answers may end after some tokens.
SPOILT = ("breaks", "ends", "error", "garbage")


def victim(world: World) -> Engine | None:
    """Draw a well engine that may fall ill; None if no other of any pool would be left, of those that take every prompt."""
    well = [engine for engine in world.engines.values() if world.lives.is_well(engine)]
    plain = [engine for engine in well if not engine.traits.dialect and engine.traits.context == CONTEXT]
    may = [
        candidate
        for candidate in well
        if any(other is not candidate and other.model == candidate.model for other in plain)
    ]
    return world.rng.choice(may) if may else None


def falls_ill(world: World, engine: Engine, illness: Illness, for_s: float) -> None:
    """Let an engine be ill for `for_s`. A lie is nothing for which it may be put out."""
    ails = bool(illness.status or illness.spoils or illness.stalls or illness.slowness > 1.0)
    engine.ill = illness
    engine.lied |= bool(illness.events)
    if ails:
        world.lives.fell_ill(engine, answers_badly=bool(illness.status or illness.spoils))

    def recover() -> None:
        engine.ill = Illness()
        if ails:
            world.lives.recovered(engine)

    asyncio.get_running_loop().call_later(for_s, recover)


def hangs(world: World, engine: Engine, for_s: float) -> None:
    """Let an engine accept requests and answer none for `for_s`."""
    world.lives.fell_ill(engine, hung=True)
    world.network.stop(engine.node, for_s)
    asyncio.get_running_loop().call_later(for_s, world.lives.recovered, engine)


def _illness(what: str, draw: Callable[[World], Illness]) -> Fault:
    def befall(world: World, for_s: float) -> str:
        engine = victim(world)
        if engine is None or engine.ill != Illness():
            return "nobody falls ill"
        illness = draw(world)
        falls_ill(world, engine, illness, for_s)
        detail = illness.status or illness.spoils or illness.load or illness.events
        return f"{engine.instance_id} {what}{f' ({detail})' if detail else ''}"

    return befall


def _hangs(world: World, for_s: float) -> str:
    if (engine := victim(world)) is None:
        return "nobody hangs"
    hangs(world, engine, for_s)
    return f"{engine.instance_id} hangs"


def _dies(world: World, for_s: float) -> str:
    if (engine := victim(world)) is None:
        return "nobody dies"
    engine.kill()
    asyncio.get_running_loop().call_later(for_s, world.restart, engine)
    return f"{engine.instance_id} dies"


ILLNESSES: tuple[Fault, ...] = (
    _hangs,
    _illness("stalls in the middle of streams", lambda world: Illness(stalls=True)),
    _illness("answers one status to everything", lambda world: Illness(status=world.rng.choice(ANSWERED))),
    _illness("spoils each answer", lambda world: Illness(spoils=world.rng.choice(SPOILT))),
    _illness("is slow", lambda world: Illness(slowness=10.0)),
    _illness("has wrong gauges", lambda world: Illness(load=world.rng.choice(("missing", "absurd")))),
    _illness(
        "tells wrong KV events",
        lambda world: Illness(events=world.rng.choice(("dropped", "contradicting", "undecodable"))),
    ),
    metrics_fail,
    agent_dies,
    _dies,
)
