"""A simulation to which instances can be added, and from which they can be removed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pointsman_lab.report.instance_samples import InstanceSample
from pointsman_lab.simulation.config import SimulationConfig, SimulationError
from pointsman_lab.simulation.request import SimulatedRequest
from pointsman_lab.simulation.simulator import MODEL, Simulator
from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.traces import TraceRequest
from pointsman_router.core import events_and_effects as ev


class ResizableSimulator(Simulator):
    """A Simulator of one pool with one router, with a fleet that can grow and shrink."""

    def __init__(
        self,
        trace: Sequence[TraceRequest] | Iterator[Session],
        config: SimulationConfig,
        max_instances: int,
        on_sample: Callable[[InstanceSample], None] | None = None,
    ) -> None:
        """`max_instances` is the maximum number of instances at any time. Raises SimulationError for several pools or routers,
        and SettingError for an unknown policy or setting."""
        for name in ("pools", "routers"):
            if getattr(config, name) != 1:
                raise SimulationError(f"{name}: must be 1 in a simulation with resizing, not {getattr(config, name)}")
        super().__init__(trace, config, on_sample, max_instances)
        # Instances that get no new requests, with the function to call when they are gone.
        self._leaving: dict[str, Callable[[float], None]] = {}

    def join(self, name: str, now: float) -> None:
        """Add an instance with an empty cache, which answers requests from now on. Mutates."""
        self.routers.deliver_to_all(self._fleet.add(name, MODEL), now)
        self._fleet.instances[name].report_load(now)

    def leave(self, name: str, now: float, on_gone: Callable[[float], None]) -> None:
        """Stop placing on an instance, and remove it when its last request has ended. Then call `on_gone` with the time. Mutates.

        As at a pod's end, running requests end first. In production the router may still place on the pod for
        POINTSMAN_ROUTER_LOST_INSTANCE_S, while the preStop hook keeps the engine open. Here a drain prevents that at once.
        """
        assert name in self.answering, name
        self._leaving[name] = on_gone
        self._tell_drains(now)
        self._remove_idle(now)

    @property
    def answering(self) -> list[str]:
        """The instances on which requests are placed."""
        return [name for name in self._fleet.instances if name not in self._leaving]

    def _tell_drains(self, now: float) -> None:
        drains = {name: self._fleet.incarnation(name) for name in self._leaving}
        self.routers.deliver_to_all(ev.DrainsChanged(drains), now)

    def _remove_idle(self, now: float) -> None:
        for name in list(self._leaving):
            if self._has_requests(name):
                continue
            on_gone = self._leaving.pop(name)
            # The agent's goodbye is sent before the drain's end, so that no request is placed in between.
            self.routers.deliver_to_all(self._fleet.remove(name), now)
            self._tell_drains(now)
            on_gone(now)

    def _has_requests(self, name: str) -> bool:
        """Return whether a request runs there, is on its way there, or may go there by a later step of its plan."""
        if self.router.reservations.counters(name).num_requests:
            return True
        return any(_concerns(running, name) for running in self._gateway.requests.values())

    def _on_effect(self, router: str, effect: ev.Effect, now: float) -> None:
        if isinstance(effect, ev.Placed) and effect.step_index == 0:
            assert effect.step.instance_id not in self._leaving, f"{effect.request_id} is placed on one that leaves"
        super()._on_effect(router, effect, now)

    def _end(self, running: SimulatedRequest, now: float, status: int, error: str) -> None:
        super()._end(running, now, status, error)
        if self._leaving:
            self._remove_idle(now)


def _concerns(running: SimulatedRequest, name: str) -> bool:
    step = running.step
    if step is None:
        return False
    concerned = (step.target, step.kv_target, step.kv_source if step.fetches else None)
    return any(target is not None and target.instance_id == name for target in concerned)
