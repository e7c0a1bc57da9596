"""Two emulated engines, and router, agent and gateway in front of them, started by one `pointsman up`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from tests.support.http_request import ask
from tests.support.processes.pointsman import plane_process, pointsman_process, wait_until_it_serves
from tests.support.processes.process import free_port
from tests.support.repository import REPOSITORY
from tests.support.waiting import until

MODEL = "pointsman-emulated"
START_S = 120.0


def _has_started(log: Path) -> bool:
    return "emulated engine" in log.read_text()


@dataclass(frozen=True)
class EmulatedFleet:
    """Addresses of a running fleet."""

    gateway_url: str
    router: str

    def decisions(self, count: int, session: str = "") -> list[fleet_pb2.Decision]:
        """Wait until `count` decisions have ended with OK; return all decisions (of a session, if given) in order of time."""

        def ended() -> list[fleet_pb2.Decision]:
            with grpc.insecure_channel(self.router) as channel:
                request = fleet_pb2.ListDecisionsRequest(page_size=1_000)
                every = fleet_pb2_grpc.FleetServiceStub(channel).ListDecisions(request, timeout=20).decisions
            found = [decision for decision in every if session in ("", decision.session_id)]
            return (
                found if sum(decision.outcome == fleet_pb2.DECISION_OUTCOME_OK for decision in found) >= count else []
            )

        found = until(ended, within_s=60, what=f"{count} decisions that ended well")
        return sorted(found, key=lambda decision: decision.time.ToNanoseconds())


@contextmanager
def emulated_fleet(folder: Path, *more: str) -> Iterator[EmulatedFleet]:
    """Run the fleet, and wait until its tokens are exact. `more`: flags of the engines."""
    listen, router = (f"127.0.0.1:{free_port()}" for _ in range(2))
    ports = [free_port(), free_port()]
    flags = ("--speedup", "10", *more)
    parts = [
        pointsman_process(f"engine-{port}", folder, "emulate", "--port", str(port), *flags, cwd=REPOSITORY)
        for port in ports
    ]
    plane = plane_process(folder, listen, router, ports, cwd=REPOSITORY)
    fleet = EmulatedFleet(f"http://{listen}", router)
    try:
        for part in parts:
            part.start()
        for part in parts:
            part.wait_ready(partial(_has_started, part.log), within_s=START_S)
        plane.start()
        wait_until_it_serves(plane, START_S)
        until(lambda: ask(f"{fleet.gateway_url}/health").json()["status"] == "ok", within_s=60, what="exact tokens")
        yield fleet
    finally:
        for part in (plane, *parts):
            if part.alive:
                part.stop(within_s=40)
    assert "Traceback (most recent" not in plane.log.read_text(), plane.tail()
