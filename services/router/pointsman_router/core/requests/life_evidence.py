"""Brings what happens to requests to the lives of their engines (engine_life.py), and tells of each change. Pure; times in s."""

from __future__ import annotations

from collections.abc import Mapping

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.engine_life import FAILURES, STALLED_S, UNREACHED, LifeSettings
from pointsman_router.core.instances.instance_registry import InstanceRecord, InstanceRegistry
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import InstanceState, Phase
from pointsman_router.core.turn import Turn


class LifeEvidence:
    """Records evidence about instances. A change of an instance's life is a change of the fleet, and an effect of the event."""

    def __init__(self, instances: InstanceRegistry, turn: Turn, settings: LifeSettings) -> None:
        self._instances = instances
        self._turn = turn
        self._settings = settings
        self.changes: list[ev.LifeChanged] = []

    def take_changes(self) -> list[ev.LifeChanged]:
        """Return the `changes` since the last call, and empty them. Mutates."""
        changes, self.changes = self.changes, []
        return changes

    def began(self, reservation: Reservation, now: float) -> None:
        """Record that an instance sent a first token, or completed a step. Mutates."""
        if (record := self._instances.get(reservation.instance_id)) is not None:
            self._judged(record, changed=record.life.began(reservation.request_id, now))

    def failed(self, reservation: Reservation, now: float) -> None:
        """Record that an instance failed at a step. Mutates."""
        if (record := self._instances.get(reservation.instance_id)) is not None:
            self._judged(record, changed=record.life.failed(reservation.request_id, now, self._settings))

    def blamed(self, instance_id: str, now: float) -> None:
        """Record that another instance answered a request to which this one sent an error. Mutates."""
        if (record := self._instances.get(instance_id)) is not None:
            self._judged(record, changed=record.life.failed("", now, self._settings))

    def finished(self, reservation: Reservation, finished: ev.Finished, now: float) -> None:
        """Record how a request ended. Mutates."""
        for refusing in finished.refused_by:
            self.blamed(refusing, now)
        if (record := self._instances.get(reservation.instance_id)) is None:
            return
        life, request_id, settings = record.life, finished.request_id, self._settings
        witness = life.works
        status = finished.http_status
        # 501 is passed on like a 4xx, since no engine of the model should do what one cannot.
        if finished.refused or (finished.outcome == "REJECTED" and (finished.broke or status >= 400)):
            changed = life.errored(request_id, status, now, settings)
        elif finished.outcome == "FAILED" and reservation.phase is Phase.DECODE:
            changed = life.broke_off(request_id, now, settings)
        elif finished.outcome == "FAILED":
            cause = FAILURES if finished.broke or status else UNREACHED
            changed = life.failed(request_id, now, settings, cause)
        elif finished.outcome in ("OK", "REJECTED"):
            changed = life.answered(request_id, now, again=reservation.phase is Phase.DECODE)
        elif finished.inferred or finished.outcome != "CANCELLED":
            life.gone(request_id)
            changed = False
        else:
            changed = life.left(request_id, now, settings)
        self._judged(record, changed=changed)
        for instance_id in finished.alike:
            if (other := self._instances.get(instance_id)) is not None and other is not record:
                excused = other.life.excused(settings, broke=finished.broke, witness=witness)
                self._judged(other, changed=excused)

    def heard(self, ago_s: Mapping[str, float], now: float) -> None:
        """Record that bytes of answers came from these instances, and how long ago. Mutates."""
        for instance_id, ago in ago_s.items():
            if (record := self._instances.get(instance_id)) is not None:
                self.sign(record, now - ago, now)

    def stalled(self, reservation: Reservation, now: float) -> None:
        """Record that an answer has begun and stands still. Mutates."""
        record = self._instances.get(reservation.instance_id)
        if record is not None and reservation.phase is Phase.DECODE:
            idle = record.computes_nothing(STALLED_S, now)
            self._judged(record, changed=record.life.stalled(reservation.request_id, now, self._settings, idle=idle))

    def sign(self, record: InstanceRecord, at: float, now: float) -> None:
        """Record any other progress of an instance's requests, which happened `at`. Mutates."""
        changed = record.life.sign(at, now)
        if changed or record.life.opened or record.state is InstanceState.UNHEALTHY:
            self._judged(record, changed=changed)

    def tick(self, now: float) -> None:
        """Put the instances out of which a first byte is overdue, unless their engines generate: answers that are not streamed
        may take that long. O(instances). Mutates."""
        for record in self._instances.unordered():
            if record.life.overdue(now) and not record.generates(STALLED_S, now):
                self._judged(record, changed=record.life.silent(now, self._settings))

    def _judged(self, record: InstanceRecord, *, changed: bool) -> None:
        record.forget_snapshot()
        if not changed:
            return
        self._instances.refresh(record)
        self._turn.fleet_changed = True
        life, info = record.life, record.info
        self.changes.append(ev.LifeChanged(info.instance_id, info.model, bool(life.opened), life.cause, life.why()))
