"""Routers of a virtual fleet: the router's own code, charged for its CPU time and checked after its events."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pydantic import SecretStr

from pointsman.router.v1 import placement_pb2
from pointsman_router.core import events_and_effects as ev
from pointsman_router.io.router import Router
from pointsman_router.io.rpc.agent_service import AgentService
from pointsman_router.io.rpc.placement_service import PlacementService
from pointsman_router.io.settings import RouterSettings
from tests.support.virtual import invariants
from tests.support.virtual.network import Method, Node

# Duration of a pool owner's lease, s.
LEASE_S = 1.0
# Policy settings with which a fleet of this size slices, holds, fetches and offloads.
SETTINGS: dict[str, dict[str, float | bool | str]] = {
    "foresight": {
        "slice_factor": 0.5,
        "slice_min_tokens": 64.0,
        "light_factor": 0.5,
        "fetch_min_tokens": 32.0,
        "interference": 5.0,
    },
    "elastic": {"heavy_new_tokens": 32.0, "throughput": 500.0},
}


class CheckedRouter(Router):
    """A router that is charged for every event, and whose invariants are checked after every `world.check_each`-th one.

    Loads are not counted unless every event is checked: they are two of five events, and what they change is checked after the
    next other event.
    """

    def __init__(self, settings: RouterSettings, world: Any, node: Node) -> None:
        super().__init__(settings)
        self._world, self._node = world, node
        self._ticked_at = time.monotonic()
        self._events = 0
        store: Any = self.store
        store._renewed = world.leases.watch(node, store._renewed)

    def submit(self, event: ev.Event) -> list[ev.Effect]:
        """Handle an event as Router does, with charge and checks."""
        if not self._node.alive:
            return []  # A timer of a dead process.
        passes = isinstance(event, ev.Tick)
        if passes:
            before, self._ticked_at = self._ticked_at, time.monotonic()
            invariants.check_tick(self.state, self._node, before, self._ticked_at)
        held = len(self.state.held_requests.queue) > 0
        effects: list[ev.Effect] = self._world.charges.submit(super().submit, event, held=held)
        if passes:
            invariants.check_held(self.state, self._ticked_at, time.monotonic())
        invariants.check_placed_by_one(self._world, self, self._node, effects)
        self._world.lives.handled(self, event, effects)
        each = self._world.check_each
        if each and (each == 1 or not isinstance(event, ev.LoadReported)):
            self._events += 1
            if not self._events % each:
                self.state.check_invariants()
        return effects


class RouterNode:
    """The router processes that run one after the other at one address."""

    def __init__(self, world: Any, address: str) -> None:
        self._world, self._address = world, address
        self._lives = 0
        self._task: asyncio.Task[None] | None = None
        self.node = Node(address)
        self.router: CheckedRouter | None = None

    def start(self) -> None:
        """Start a new process."""
        self._lives += 1
        self.node = Node(self._address)
        self._task = self.node.spawn(self._run())

    async def _run(self) -> None:
        chosen: dict[str, Any] = {
            "redis_url": SecretStr("redis://redis"),
            "router_id": f"{self._address}-{self._lives}",
            "policy": self._world.policy,
            "policy_settings": SETTINGS.get(self._world.policy, {}),
            "owner_lease_s": LEASE_S,
            "gateway_lease_s": 5.0,
            "lost_instance_s": 6.0,
            "queue_timeout_s": 5.0,
            "queue_size": self._world.queue_size,
            "startup_wait_s": 2.0,
            "max_requests_per_instance": 4,
        }
        settings = RouterSettings(**chosen | self._world.router_settings)
        router = self.router = CheckedRouter(settings, self._world, self.node)
        router.store.address = self._address
        services = {
            "/pointsman.router.v1.PlacementService/Session": Method(
                PlacementService(router, lambda *_: True).Session, placement_pb2.SessionRequest.FromString
            ),
            "/pointsman.agent.v1.AgentService/Report": Method(
                AgentService(router, lambda authorization, names, instance: True).Report, bytes
            ),
        }
        self._world.network.listen(self._address, self.node, services)
        await router.run()

    async def stop(self) -> None:
        """Stop in order, as in a rollout."""
        router, self.router = self.router, None
        assert self._task is not None
        assert router is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        router.end_sessions()
        router.end_reports()
        await asyncio.sleep(0.3)
        self.kill()

    @property
    def up(self) -> bool:
        """Whether the router runs, and is not stopping."""
        return self.router is not None

    def kill(self) -> None:
        """Kill the process."""
        self.router = None
        self._world.network.kill(self.node)
