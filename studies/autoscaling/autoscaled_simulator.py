"""A simulation whose fleet is scaled by a HorizontalPodAutoscaler, as a StatefulSet with podManagementPolicy Parallel. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.simulator import MODEL
from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.traces import TraceRequest
from studies.autoscaling.horizontal_autoscaler import (
    SYNC_EVERY_S,
    AutoscalerSettings,
    HorizontalAutoscaler,
)
from studies.autoscaling.resizable_simulator import ResizableSimulator
from studies.autoscaling.signals import Signal

# Age of a figure when the autoscaler reads it, s. Prometheus scrapes at the same interval as the autoscaler syncs, at another
# moment, so the mean age is half of the interval.
FIGURE_AGE_S = SYNC_EVERY_S / 2


@dataclass
class InstanceLife:
    """One instance. It is paid for from `wanted_at` until `gone_at` (s; None: it is not gone). `ready_at` is None before it can
    answer requests."""

    name: str
    wanted_at: float
    ready_at: float | None = None
    gone_at: float | None = None

    def paid_s(self, until: float) -> float:
        """Return the time for which the instance was paid before `until`, in s."""
        return max(min(until, until if self.gone_at is None else self.gone_at) - self.wanted_at, 0.0)


@dataclass(frozen=True)
class Sync:
    """One sync of the autoscaler: the signal's figure, and the number of wanted replicas before and after."""

    at: float
    figure: float | None
    before: int
    after: int


class AutoscaledSimulator(ResizableSimulator):
    """It starts with the configuration's instances, named i0, i1, ... Instances with the highest numbers are removed first.
    `lives` and `syncs` record the changes of the fleet."""

    def __init__(
        self,
        trace: Sequence[TraceRequest] | Iterator[Session],
        config: SimulationConfig,
        settings: AutoscalerSettings,
        signal: Signal,
        startup_s: float,
    ) -> None:
        """`startup_s` is the time from the creation of an instance's pod to its first answer: image, weights, compiling. Raises
        as ResizableSimulator does."""
        super().__init__(trace, config, settings.max_replicas)
        self._settings = settings
        self._signal = signal
        self._startup_s = startup_s
        self._replicas = config.instances
        self._autoscaler = HorizontalAutoscaler(settings, config.instances, 0.0)
        self._starting: dict[str, InstanceLife] = {}
        self._present = {name: InstanceLife(name, 0.0, 0.0) for name in self._fleet.instances}
        self.lives = list(self._present.values())
        self.syncs: list[Sync] = []

    def run_until(self, end_s: float) -> list[RequestRecord]:
        """Run until `end_s`; return the records of the requests that have ended. A fleet that is too small may never answer all
        requests. To be called once, instead of run()."""
        self._begin()
        self._clients.start()
        while not self._clients.done and self._event_queue.next_time <= end_s:
            self._event_queue.run_next()
        return self._ended

    def _begin(self) -> None:
        super()._begin()
        self._every(SYNC_EVERY_S, self._read)

    def _read(self, now: float) -> None:
        loads = [instance.load(now) for instance in self._fleet.instances.values()]
        figure = self._signal(self.router, MODEL, loads, now)
        self._event_queue.schedule(now + FIGURE_AGE_S, partial(self._sync, figure))

    def _sync(self, figure: float | None, now: float) -> None:
        before = self._replicas
        self._replicas = self._autoscaler.replicas(figure, before, len(self.answering), now)
        self.syncs.append(Sync(now, figure, before, self._replicas))
        wanted = {_name(number) for number in range(self._replicas)}
        for name in [starting for starting in self._starting if starting not in wanted]:
            self._starting.pop(name).gone_at = now
        for name in [answering for answering in self.answering if answering not in wanted]:
            self.leave(name, now, partial(self._on_gone, name))
        self._start_missing(now)

    def _start_missing(self, now: float) -> None:
        """Start the instances that are wanted and do not exist. A name is free again when its pod is gone, not while it
        leaves."""
        for number in range(self._replicas):
            name = _name(number)
            if name not in self._present and name not in self._starting:
                life = self._starting[name] = InstanceLife(name, now)
                self.lives.append(life)
                self._event_queue.schedule(now + self._startup_s, partial(self._on_ready, life))

    def _on_ready(self, life: InstanceLife, now: float) -> None:
        if life.gone_at is not None:
            return
        life.ready_at = now
        self._present[life.name] = self._starting.pop(life.name)
        self.join(life.name, now)

    def _on_gone(self, name: str, now: float) -> None:
        self._present.pop(name).gone_at = now
        self._start_missing(now)


def _name(number: int) -> str:
    return f"i{number}"
