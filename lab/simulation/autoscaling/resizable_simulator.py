"""A simulation whose instances come and go. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pointsman.lab.report.instance_samples import InstanceSample
from pointsman.lab.simulation.config import SimulationConfig, SimulationError
from pointsman.lab.simulation.request import SimulatedRequest
from pointsman.lab.simulation.simulator import MODEL, Simulator
from pointsman.lab.workload.session_starts import Session
from pointsman.lab.workload.traces import TraceRequest
from pointsman.router.core import events_and_effects as ev


class ResizableSimulator(Simulator):
    """A Simulator of one pool with one router, to which instances can be added, and from which they can be removed."""

    def __init__(
        self,
        trace: Sequence[TraceRequest] | Iterator[Session],
        config: SimulationConfig,
        max_instances: int,
        on_sample: Callable[[InstanceSample], None] | None = None,
    ) -> None:
        """There are never more than `max_instances`. Raises SimulationError for several pools or routers, SettingError for an
        unknown policy or setting."""
        for name in ("pools", "routers"):
            if getattr(config, name) != 1:
                raise SimulationError(f"{name}: only one can be resized, not {getattr(config, name)}")
        super().__init__(trace, config, on_sample, max_instances)
        # Instances that get nothing new, with what to do once they are gone.
        self._leaving: dict[str, Callable[[float], None]] = {}

    def join(self, name: str, now: float) -> None:
        """A new instance answers from now on; its cache is empty. Mutates."""
        self.routers.deliver_to_all(self._fleet.add(name, MODEL), now)
        self._fleet.instances[name].report_load(now)

    def leave(self, name: str, now: float, on_gone: Callable[[float], None]) -> None:
        """An instance gets nothing new from now on, and is gone when its last request has ended, if it has any: then `on_gone`
        is told the moment. Mutates.

        As a pod's end is: what runs ends first. There the router may place on it for POINTSMAN_ROUTER_LOST_INSTANCE_S more,
        during which the preStop hook keeps the engine open; here a drain keeps it from doing so at once.
        """
        assert name in self.answering, name
        self._leaving[name] = on_gone
        self._tell_drains(now)
        self._remove_idle(now)

    @property
    def answering(self) -> list[str]:
        """The instances that are placed on."""
        return [name for name in self._fleet.instances if name not in self._leaving]

    def _tell_drains(self, now: float) -> None:
        drains = {name: self._fleet.incarnation(name) for name in self._leaving}
        self.routers.deliver_to_all(ev.DrainsChanged(drains), now)

    def _remove_idle(self, now: float) -> None:
        for name in list(self._leaving):
            if self._has_requests(name):
                continue
            on_gone = self._leaving.pop(name)
            # The agent's word before the drain's end: nothing is placed in between.
            self.routers.deliver_to_all(self._fleet.remove(name), now)
            self._tell_drains(now)
            on_gone(now)

    def _has_requests(self, name: str) -> bool:
        """Whether a request runs there, is on its way there, or may yet come there by a later step of its plan."""
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
    return step is not None and (
        step.target.instance_id == name or (step.kv_target is not None and step.kv_target.instance_id == name)
    )
