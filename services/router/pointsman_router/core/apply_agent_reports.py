"""Applies agents' reports to the instances and to the prefix indexes. Pure. Only RouterState calls it."""

from __future__ import annotations

from pointsman_common.core.block_keys import KEY_SCHEME, KEY_TOKENS
from pointsman_common.core.key_report_types import Delta
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_registry import InstanceRecord, InstanceRegistry
from pointsman_router.core.instances.stale_reservations import stale_reservations
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.learning.prefix_knowledge import PrefixKnowledge
from pointsman_router.core.load.reservations import Reservations
from pointsman_router.core.placement_types import InstanceState
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.requests.life_evidence import LifeEvidence
from pointsman_router.core.requests.placement_plans import PlacementPlans
from pointsman_router.core.requests.request_table import RequestTable
from pointsman_router.core.turn import Turn

# How long an instance is kept whose agent is gone, if it gets no requests and no other one of its pool has an agent, s.
KEEP_IDLE_S = 3_600.0
# How long an instance is kept and tried whose agent is gone and which is out by its requests, s. Gateways may reach it again
# before an agent does. If its machine is gone, too, each trial delays a request, at most one in LifeSettings.max_open_s.
KEEP_OUT_S = 300.0
# Number of loads per second, of all instances, above which agents are asked to send fewer. A load takes 75 us of the router's CPU
# time, so a thousand engines that send 20 a second each would need 1.5 cores. MIN_LOAD_INTERVAL_S: interval at which agents send
# loads without a limit. MAX_LOAD_INTERVAL_S: the longest one that is asked for, so that a load stays useful.
MAX_LOADS_PER_S = 1_500
MIN_LOAD_INTERVAL_S = 0.05
MAX_LOAD_INTERVAL_S = 1.6
# As for loads, for messages about changes of keys. A busy engine publishes changes at each step, 20 to 50 times a second, and a
# message takes 0.3 ms of CPU time in the agent and as much in the router, nearly all of it gRPC's. What changes by the router's
# own placements it knows before.
MAX_KEY_MESSAGES_PER_S = 2_500
MIN_KEY_INTERVAL_S = 0.1
MAX_KEY_INTERVAL_S = 0.8
# After so many intervals between two messages, and so many s, an agent that has sent none may be replaced by another one.
SILENT_INTERVALS, MIN_SILENCE_S = 3, 5.0


def load_interval_s(instances: int) -> float:
    """Return the minimum interval between two loads of each of so many instances, s; 0 without a limit. The interval doubles, so
    that agents rarely get another one."""
    interval = _interval_s(instances, MAX_LOADS_PER_S, MIN_LOAD_INTERVAL_S, MAX_LOAD_INTERVAL_S)
    return interval if interval > MIN_LOAD_INTERVAL_S else 0.0


def key_interval_s(instances: int) -> float:
    """Return the minimum interval between two messages about changes of keys of each of so many instances, s."""
    return _interval_s(instances, MAX_KEY_MESSAGES_PER_S, MIN_KEY_INTERVAL_S, MAX_KEY_INTERVAL_S)


def _interval_s(instances: int, most_per_s: float, interval: float, longest: float) -> float:
    while instances > most_per_s * interval and interval < longest:
        interval *= 2
    return interval


def _is_rival(known: InstanceRecord, hello: ev.AgentHello, now: float) -> bool:
    """Return whether another agent announces an instance whose own agent is alive: not one that takes the place of an agent
    whose node is gone."""
    silence_s = max(SILENT_INTERVALS * known.report_interval_s, MIN_SILENCE_S)
    return (
        known.lost_at is None
        and known.stream_id != hello.stream_id
        and "" not in (known.agent_id, hello.agent_id)
        and known.agent_id != hello.agent_id
        and now - known.heard_at < silence_s
    )


class AgentReports:
    """Applies the events of agents' streams. `stale_report_s`: age up to which a load report is used, s. `lost_instance_s`: how
    long an instance without a stream is kept, s."""

    def __init__(
        self,
        instances: InstanceRegistry,
        index: PrefixIndex,
        prefix_knowledge: PrefixKnowledge,
        prefill_observer: PrefillObserver,
        reservations: Reservations,
        requests: RequestTable,
        plans: PlacementPlans,
        evidence: LifeEvidence,
        turn: Turn,
        *,
        stale_report_s: float,
        lost_instance_s: float,
    ) -> None:
        self._instances = instances
        self._index = index
        self._prefix_knowledge = prefix_knowledge
        self._prefill_observer = prefill_observer
        self._reservations = reservations
        self._requests = requests
        self._plans = plans
        self._evidence = evidence
        self._turn = turn
        self._stale_report_s = stale_report_s
        self._lost_instance_s = lost_instance_s

    def hello(self, hello: ev.AgentHello, now: float) -> list[ev.Effect]:
        """Welcome or refuse an agent that opened a stream. Mutates."""
        info = hello.info
        if hello.key_scheme != KEY_SCHEME:
            return [
                ev.RefuseReport(hello.stream_id, f"key scheme {hello.key_scheme!r}: this router uses {KEY_SCHEME!r}")
            ]
        if info.block_size <= 0 or info.block_size % KEY_TOKENS:
            return [ev.RefuseReport(hello.stream_id, f"block size {info.block_size} is no multiple of {KEY_TOKENS}")]
        if not (info.instance_id and info.incarnation and info.url and info.model):
            return [ev.RefuseReport(hello.stream_id, "instance_id, incarnation, url and model must not be empty")]
        effects: list[ev.Effect] = []
        before = self._instances.get(info.instance_id)
        if before is not None and _is_rival(before, hello, now):
            # Two engines with one id would take turns, and each turn drops the keys of the other.
            before.rival = f"agent {hello.agent_id} ({info.url} on {info.node or 'an unknown node'})", now
            why = f"{info.instance_id} is reported by agent {before.agent_id} ({before.info.url} on {before.info.node})"
            advice = "give each engine its own address, and only one agent"
            return [ev.RefuseReport(hello.stream_id, f"{why}: {advice}", replaced=True)]
        if before is not None and before.lost_at is None and before.stream_id != hello.stream_id:
            effects.append(ev.RefuseReport(before.stream_id, "a newer stream reports this instance", replaced=True))
        if before is not None:
            self._prefix_knowledge.silence_ends(before, now)
            if before.info.incarnation != info.incarnation:
                self._prefix_knowledge.forget(info.instance_id)
        had_placements = before is not None and before.needs_placements
        record = self._instances.add(info, hello.stream_id, now)
        record.report_interval_s = hello.report_interval_s
        record.load_interval_s = record.key_interval_s = 0.0
        record.greeted_seq = hello.latest_seq
        record.accepts_pace, record.agent_id = hello.accepts_pace, hello.agent_id
        resume = record.follows_events and record.sync.can_resume(hello.oldest_seq, hello.latest_seq)
        if not resume:
            record.sync.reset()
        self._prefix_knowledge.keep_placements(record, had_placements)
        effects.append(
            ev.Welcome(hello.stream_id, snapshot=not resume, resume_from_seq=record.sync.seq + 1 if resume else 0)
        )
        self._turn.fleet_changed = True
        return effects

    def keys(self, event: ev.KeysReported, now: float) -> list[ev.Effect]:
        """Apply a message about an instance's keys. Mutates."""
        record = self._reporter(event.stream_id, event.instance_id)
        if record is None:
            return []
        effects = self._heard(record, now)
        # After a failed audit a new snapshot is on its way: the copy ignores this message.
        if not (record.follows_events or record.sync.full):
            return effects
        before, had_placements = record.state, record.needs_placements
        failure = record.sync.handle(event.message)
        self._prefix_knowledge.keep_placements(record, had_placements)
        progressed = self._prefix_knowledge.keys_reported(record, event.message, now)
        # What an agent lists as it begins, the engine may have computed long ago.
        if progressed and isinstance(event.message, Delta) and event.message.seq > record.greeted_seq:
            self._evidence.sign(record, now, now)
        for prompt in progressed:
            self._requests.progress(prompt.request_id, prompt.prefilled_tokens)
        self._turn.fleet_changed |= record.state is not before
        if failure:
            effects.append(ev.Resync(event.stream_id, event.instance_id, failure))
        return effects + self._prefix_knowledge.compare(record, now)

    def load(self, event: ev.LoadReported, now: float) -> list[ev.Effect]:
        """Record a load sample and learn from its steps; cancel stale reservations if the engine has been idle long enough.
        Mutates."""
        record = self._reporter(event.stream_id, event.instance_id)
        if record is None:
            return []
        effects = self._heard(record, now) + self._prefix_knowledge.counted(record, event.load, now)
        effects += self._prefix_knowledge.compare(record, now)
        before = record.underlying_state
        record.set_load(event.load, now)
        if event.load.steps is not None:
            self._prefill_observer.steps_reported(record.info, event.load.steps, now)
        if record.underlying_state is not before:
            self._instances.refresh(record)
            self._turn.fleet_changed = True
        if record.idle_reports.observe(event.load, now, self._stale_report_s):
            effects += self._release_stale(record, now)
        return effects

    def gone(self, event: ev.AgentGoodbye | ev.AgentLost, now: float) -> list[ev.Effect]:
        """Handle the end of a stream: remove the instance after a goodbye, else mark it as lost. Mutates."""
        record = self._reporter(event.stream_id, event.instance_id)
        if record is None:
            return []
        if isinstance(event, ev.AgentGoodbye):
            self._remove(event.instance_id)
        else:
            had_placements = record.needs_placements
            record.heard_at = record.lost_at = now
            self._prefix_knowledge.keep_placements(record, had_placements)
            record.forget_snapshot()
        self._turn.fleet_changed = True
        return []

    def tick(self, now: float) -> list[ev.Effect]:
        """Remove instances lost for `lost_instance_s`, unless their engines answer, are tried, or nobody else answers (`_keeps`);
        request a new snapshot of each instance that did not fit into the index and does now; tell agents how often to send
        loads and keys. Mutates."""
        effects: list[ev.Effect] = []
        records = self._instances.records()
        # What is drained, asleep or out answers nobody in the place of an instance that is removed. Mostly none is lost.
        lost = any(record.lost_at is not None for record in records)
        taking = (record for record in records if record.lost_at is None and _takes_requests(record)) if lost else ()
        reported = {record.info.model for record in taking}
        # What is asked for must fit together, and with the snapshots that are under way.
        room = self._index.max_keys - len(self._index)
        room -= sum(record.sync.missing for record in records if record.sync.is_incomplete and record.lost_at is None)
        loads_s, keys_s = load_interval_s(len(records)), key_interval_s(len(records))
        for record in records:
            sent = (record.load_interval_s, record.key_interval_s)
            if record.accepts_pace and sent != (loads_s, keys_s) and record.lost_at is None:
                record.load_interval_s, record.key_interval_s = loads_s, keys_s
                effects.append(ev.Pace(record.stream_id, loads_s, keys_s))
            if record.lost_at is not None and record.lost_at + self._lost_instance_s <= now:
                if why := self._keeps(record, record.info.model in reported, now):
                    if not record.kept:
                        record.kept = True
                        effects.append(ev.InstanceKept(record.info.instance_id, record.info.model, why))
                        effects += self._requests_lost(record)
                    continue
                self._remove(record.info.instance_id)
                effects += self._requests_lost(record)
                self._turn.fleet_changed = True
            elif record.sync.full and record.lost_at is None and record.sync.missing <= room:
                room -= record.sync.missing
                had_placements = record.needs_placements
                record.sync.reset()
                self._prefix_knowledge.keep_placements(record, had_placements)
                record.forget_snapshot()
                reason = "the index has room again"
                effects.append(ev.Resync(record.stream_id, record.info.instance_id, reason))
                self._turn.fleet_changed = True
        return effects

    def _requests_lost(self, record: InstanceRecord) -> list[ev.Effect]:
        """Return the orders to leave an instance. Its machine may be gone: then nothing else ends the connections to it."""
        return [
            ev.Move(reservation.request_id, reservation.gateway_id, lost=True)
            for reservation in self._reservations.of_instance(record.info.instance_id)
            if reservation.gateway_id
        ]

    def _keeps(self, record: InstanceRecord, others: bool, now: float) -> str:
        """Return why an instance stays although its agent is gone, for people; empty if it does not. `others`: whether another
        instance of its pool has an agent and takes requests."""
        life = record.life
        assert record.lost_at is not None
        if now - life.sign_at <= self._lost_instance_s:
            return "its engine answers"
        if life.opened and now - max(record.lost_at, life.out_since) <= KEEP_OUT_S:
            return "its engine is out, and may answer a request on trial"
        if not others and now - max(record.lost_at, life.sign_at) <= KEEP_IDLE_S:
            return "no instance of its pool that has an agent takes requests"
        return ""

    def _reporter(self, stream_id: int, instance_id: str) -> InstanceRecord | None:
        """Return the instance's record, or None if another stream reports the instance."""
        record = self._instances.get(instance_id)
        return record if record is not None and record.stream_id == stream_id else None

    def _heard(self, record: InstanceRecord, now: float) -> list[ev.Effect]:
        """Note that the instance's agent sent a message; return the effects of the prediction audit. Mutates."""
        effects = self._prefix_knowledge.heard(record, now)
        record.heard_at = now
        record.forget_snapshot()
        return effects

    def _release_stale(self, record: InstanceRecord, now: float) -> list[ev.Effect]:
        instance_id = record.info.instance_id
        gone = stale_reservations(
            self._reservations.of_instance(instance_id),
            self._requests.opened_at,
            record.idle_reports.since,
            now,
        )
        error = "its instance runs nothing and no gateway claims it"
        return [effect for reservation in gone for effect in self._plans.cancelled(reservation.request_id, error, now)]

    def _remove(self, instance_id: str) -> None:
        self._instances.remove(instance_id)
        self._prefix_knowledge.forget(instance_id)


def _takes_requests(record: InstanceRecord) -> bool:
    return record.state in (InstanceState.READY, InstanceState.SYNCING) and not record.life.opened
