"""Every part of a control plane before real engines is killed, stops for a while, and is restarted, one after the other, while
agents are served; engines stop and are killed. There is one of each part, so that clients of the gateway notice its loss."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.support.engines.model import vocabulary
from tests.support.engines.servers import SERVED_NAME, Engine
from tests.support.fault_under_load import fault_under_load
from tests.support.http_request import serves
from tests.support.instances import IN_STEP
from tests.support.processes.control_plane import ControlPlane
from tests.support.processes.process import Process
from tests.support.trace_replay import CheckedLoad
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

STOPPED_S, HEALTHY_WITHIN_S = 2.0, 60.0
Harm = Callable[[Process], Awaitable[None]]


class RealFleet:
    """The control plane and its engines, as a FleetUnderFault."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        words = [f" {word}" for word in vocabulary()]
        self.replay = CheckedLoad(plane.gateway_url, SERVED_NAME, words, scale=1 / 40, clients=4, known=False)
        self._made = self._generations()
        self._tracebacks: list[str] = []

    async def repair(self) -> None:
        """Start the parts that an earlier test has left dead, and wait until all are healthy."""
        for part in (self.plane.redis, self.plane.router, self.plane.agent, self.plane.gateway):
            if not part.alive:
                part.start()
        await self.wait_until_healthy()
        self._made = self._generations()

    async def wait_until_healthy(self) -> None:
        """Wait until the gateway serves and the router knows all engines."""
        await asyncio.to_thread(until, self._all_there, within_s=HEALTHY_WITHIN_S, what="all there")

    def _all_there(self) -> bool:
        known = self.plane.instances()
        states = [
            known[engine.instance_id].state in IN_STEP for engine in self.plane.engines if engine.instance_id in known
        ]
        return len(states) == len(self.plane.engines) and all(states) and serves(self.plane.gateway_url)

    async def wait_until_at_rest(self) -> None:
        """Wait until nothing is open, and the router knows what the engines have cached."""
        await asyncio.to_thread(self.plane.wait_idle)
        await asyncio.to_thread(self.plane.wait_settled)

    def repeated_answers(self) -> list[str]:
        """The number of answers beyond those that the clients account for: engines do not report which answers they have made."""
        made = {name: count - self._made.get(name, 0) for name, count in self._generations().items()}
        counts = self.replay.counts()
        # An answer that broke off on its way to the client may have been generated.
        beyond = sum(made.values()) - counts["whole"] - counts["reset"] - counts["broken"]
        return [f"{beyond} answers"] if beyond > 0 else []

    def forget(self, engine: Engine) -> None:
        """Reset the engine's count: after a restart it no longer reports what it generated before."""
        self._made[engine.instance_id] = 0

    def new_tracebacks(self) -> list[str]:
        """Errors that nobody handled."""
        before, self._tracebacks = self._tracebacks, self.plane.tracebacks()
        return self._tracebacks[len(before) :]

    def _generations(self) -> dict[str, int]:
        return {
            engine.instance_id: int(engine.metric("vllm:request_success_total", finished_reason="length"))
            for engine in self.plane.engines
        }


@pytest.fixture(scope="module")
def fleet(running_plane: ControlPlane) -> Iterator[RealFleet]:
    """The fleet, in step with its engines before and after the tests."""
    with running_plane.in_step():
        yield RealFleet(running_plane)


async def killed(part: Process) -> None:
    part.kill()
    await asyncio.sleep(0.5)
    part.start()


async def stopped(part: Process) -> None:
    os.killpg(part.pid, signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    os.killpg(part.pid, signal.SIGCONT)


async def restarted(part: Process) -> None:
    assert await asyncio.to_thread(part.stop) == 0, part.tail()
    part.start()


@pytest.mark.parametrize("name", ["agent", "router", "redis", "gateway"])
@pytest.mark.parametrize("what", [killed, stopped, restarted], ids=lambda fault: fault.__name__)
async def test_a_part_of_the_control_plane_fails(fleet: RealFleet, name: str, what: Harm) -> None:
    part: Process = getattr(fleet.plane, name)
    # No other gateway takes its place: connections are refused, and for a moment it knows no instance yet.
    may = ("reset", "broken", "503") if name == "gateway" else ()
    async with fault_under_load(fleet, f"real engines: {name} {_name(what)}", may=may):
        await what(part)


async def test_an_engine_stops_for_a_while(fleet: RealFleet) -> None:
    async with fault_under_load(fleet, "real engines: engine stopped"):
        await stopped(fleet.plane.engines[0].process)


async def test_an_engine_is_killed_and_starts_again(fleet: RealFleet) -> None:
    engine: Engine = fleet.plane.engines[1]
    before = fleet.plane.instance(engine).instance.incarnation

    def reborn() -> bool:
        status = fleet.plane.instances().get(engine.instance_id)
        return status is not None and status.instance.incarnation != before and status.state in IN_STEP

    async with fault_under_load(fleet, "real engines: engine killed", may=("broken",)) as fault:
        await killed(engine.process)
        fault.ends_now()
        await asyncio.to_thread(engine.wait_ready)
        fleet.forget(engine)
        await asyncio.to_thread(until, reborn, within_s=HEALTHY_WITHIN_S, what="its new life known")


def _name(what: Harm) -> str:
    return getattr(what, "__name__", "")
