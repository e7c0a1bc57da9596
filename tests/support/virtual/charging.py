"""Charges the routers and agents of a virtual fleet for their CPU time, as in a fleet of the declared size.

Each prebuilt session, key and instance stands for a number of them, and costs as much as that number does. The sizes of parts in
which the services work (pages, turns of a sweep) are divided by the same number, but are at least 1. So the whole takes as long
as in the declared fleet. A part costs no more than the declared part, or than one prebuilt item if that costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from pointsman_agent.core import key_report_sequence, report_protocol
from pointsman_common.core.key_report_types import Delta, SnapshotChunk
from pointsman_lab.rival_policies.registry import POLICIES
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core import router_state
from pointsman_router.core.fleet_view_builder import FleetViewBuilder
from pointsman_router.core.load import affinity
from pointsman_router.core.prefix import exact_index
from pointsman_router.core.shortlist import MAX_FULL_VIEW
from pointsman_router.io.convert.sent_fleet import SentFleet
from pointsman_router.io.store import redis_store
from tests.support.virtual import costs
from tests.support.virtual.costs import Declared
from tests.support.virtual.engines import CAPACITY_BLOCKS, LOAD_S
from tests.support.virtual.loop import SHORTEST_TURN_S, VirtualLoop

# Number of sessions per pool that Redis has when the fleet starts (if the declared size has any); prefix of their names.
PREBUILT_SESSIONS, PREBUILT = 50, "~"
# Number of parts in which the reports that one report stands for are charged, one after the other.
REPORT_PARTS = 10
# Number of the index's dicts; a dict is swept at once. Fewer dicts cost the tests less. In a large fleet each has few built keys.
SHARDS, SHARDS_OF_LARGE = 8, 64


class Charges:
    """Charges on `loop` for a fleet of `declared` size, of which `pools` pools and `engines` engines are built."""

    def __init__(
        self, loop: VirtualLoop, declared: Declared, *, pools: int, engines: int, as_it_is: bool = False
    ) -> None:
        """`as_it_is`: the fleet is built in its full size, so the number of the index's dicts is not changed."""
        self._charge = loop.charge
        self._loop = loop
        self._as_it_is = as_it_is
        self.declared = declared
        self.sessions = _ratio(declared.sessions, pools * PREBUILT_SESSIONS)
        """Number of sessions that a prebuilt session stands for. `keys` and `instances` likewise."""
        self.keys = _ratio(declared.keys, engines * CAPACITY_BLOCKS)
        self.instances = _ratio(declared.instances, engines)
        self.keys_of_one = max(self.keys / self.instances, 1.0)
        self.decisions = 1.0
        """Number of recorded decisions that one stands for, when WhatIf makes it again."""

    # ---- charges of Redis and its clients ----

    def fields(self, reply: Mapping[str, str]) -> float:
        """Return the number of fields that the fields of a reply stand for."""
        return sum(self.sessions if name.startswith(PREBUILT) else 1.0 for name in reply)

    def changes(self, args: Any) -> float:
        """Return the number of changes that a call of APPLY with these arguments stands for; 0 for other scripts."""
        if len(args) != 5 or not isinstance(args[2], bytes):
            return 0.0
        prebuilt = args[2].count(b'["own","%s' % PREBUILT.encode())
        return args[2].count(b"],[") + 1 + prebuilt * (self.sessions - 1.0)

    def parsed(self, fields: float) -> None:
        """Charge the client for reading a reply of `fields` fields."""
        self._charge(fields * costs.SESSION_PARSED_S)

    # ---- charges of a router ----

    def submit(self, submit: Callable[[ev.Event], list[ev.Effect]], event: ev.Event, *, held: bool) -> list[ev.Effect]:
        """Charge a router for an event and make it handle the event. `held`: requests are held, which load reports may try."""
        self._charge(costs.EVENT_S)
        match event:
            case ev.LoadReported() if self.instances > 1.0:
                # The report stands for those of other instances. Handling it a second time shows what each of those costs.
                self._charge((self.instances - 1.0) * costs.EVENT_S)
                effects = submit(event)
                if held:
                    begun = self._loop.time()
                    effects += submit(event)
                    self._spread((self._loop.time() - begun) * max(self.instances - 2.0, 0.0))
                return effects
            case ev.KeysReported(_, _, SnapshotChunk() as chunk):
                self._charge(len(chunk.keys) * self.keys_of_one * costs.REPORTED_KEY_S)
            case ev.KeysReported(_, _, Delta() as delta):
                self._charge((len(delta.added) + len(delta.removed)) * costs.REPORTED_KEY_S)
            case ev.PoolTaken():
                self._charge(len(event.reservations) * self.instances * costs.RESERVATION_TAKEN_S)
        return submit(event)

    def _spread(self, seconds: float) -> None:
        """Charge the running node for work that is spread over the interval until the instance's next report."""
        for part in range(REPORT_PARTS if seconds > SHORTEST_TURN_S else 0):
            self._loop.call_later(LOAD_S * part / REPORT_PARTS, self._charge, seconds / REPORT_PARTS)

    @contextmanager
    def charging(self) -> Iterator[None]:
        """Replace the services' functions by ones that are charged, inside the block."""
        with ExitStack() as stack:

            def replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
                stack.enter_context(mock.patch.object(owner, name, made(getattr(owner, name))))

            def smaller(owner: Any, name: str, ratio: float) -> None:
                stack.enter_context(mock.patch.object(owner, name, _smaller(getattr(owner, name), ratio)))

            if not self._as_it_is:
                shards = SHARDS_OF_LARGE if self.declared.large else SHARDS
                stack.enter_context(mock.patch.object(exact_index, "SHARDS", shards))
                stack.enter_context(mock.patch.object(exact_index, "_SHARD", shards - 1))
            smaller(affinity, "CHUNK", self.sessions)
            smaller(affinity, "DROPPED_AT_ONCE", self.sessions)
            smaller(key_report_sequence, "CHUNK_KEYS", self.keys_of_one)
            replace(FleetViewBuilder, "view", self._view)
            replace(FleetViewBuilder, "has_room", self._has_room)
            replace(router_state.RouterState, "what_if", self._what_if)
            replace(exact_index.PrefixIndex, "__init__", self._index)
            replace(exact_index.PrefixIndex, "_sweep_on", self._sweep_on)
            replace(affinity.Affinity, "recall", self._recall)
            replace(affinity.Affinity, "expire", self._expire)
            replace(redis_store, "_change", self._change)
            replace(SentFleet, "whole", self._whole)
            replace(report_protocol.ReportProtocol, "next_message", self._next_message)
            yield

    def _looked_at(self, built: int, *, shortlisted: bool) -> float:
        """Return the number of candidates that a decision on `built` candidates stands for."""
        return min(built * self.instances, max(MAX_FULL_VIEW, built)) if shortlisted else built * self.instances

    def _view(self, view: Any) -> Any:
        def charged(
            views: FleetViewBuilder, request: Any, *given: Any, shortlisted: bool = False, only: str = ""
        ) -> Any:
            found = view(views, request, *given, shortlisted=shortlisted, only=only)
            built = len(found.candidates)
            looked_at = built if only else self._looked_at(built, shortlisted=shortlisted)
            self._charge(costs.PLACEMENT_S + looked_at * costs.CANDIDATE_S + len(request.keys) * costs.PROMPT_KEY_S)
            return found

        return charged

    def _has_room(self, has_room: Any) -> Any:
        def charged(views: FleetViewBuilder, pool: str, model: str, now: float) -> bool:
            self._charge(len(views._instances.members(pool, model)) * self.instances * costs.ROOM_S)
            return bool(has_room(views, pool, model, now))

        return charged

    def _what_if(self, what_if: Any) -> Any:
        def charged(state: Any, decision: Any, policy: Any) -> Any:
            shortlisted = POLICIES[decision.policy.name].uses_shortlist
            seen = self._looked_at(len(decision.view.candidates), shortlisted=shortlisted)
            self._charge(self.decisions * (costs.WHAT_IF_S + seen * costs.WHAT_IF_CANDIDATE_S))
            return what_if(state, decision, policy)

        return charged

    def _index(self, init: Any) -> Any:
        def smaller(index: Any, max_keys: int = exact_index.UNBOUNDED) -> None:
            init(index, max_keys, _smaller(exact_index.SWEEP_KEYS, self.keys))

        return smaller

    def _sweep_on(self, sweep_on: Any) -> Any:
        def charged(index: Any) -> None:
            unswept = index._unswept or range(len(index._masks))
            before = [len(index._masks[number]) for number in unswept]
            sweep_on(index)
            looked_at = sum(before[len(index._unswept) :])
            self._charge(looked_at * self.keys * costs.SWEPT_KEY_S)

        return charged

    def _recall(self, recall: Any) -> Any:
        def charged(sessions: Any, pool: str, session: str, instance_id: str, now: float) -> None:
            self._charge(costs.SESSION_RECALLED_S * (self.sessions if session.startswith(PREBUILT) else 1.0))
            recall(sessions, pool, session, instance_id, now)

        return charged

    def _expire(self, expire: Any) -> Any:
        def charged(sessions: Any, now: float) -> None:
            before = sessions.left_to_free
            expire(sessions, now)
            freed = (before - sessions.left_to_free) / 2
            self._charge(freed * self.sessions * costs.SESSION_FREED_S)

        return charged

    def _change(self, change: Any) -> Any:
        def charged(effect: Any) -> Any:
            many = isinstance(effect, ev.SessionOwnerSet) and effect.session.startswith(PREBUILT)
            self._charge(costs.CHANGE_WRITTEN_S * (self.sessions if many else 1.0))
            return change(effect)

        return charged

    def _whole(self, whole: Any) -> Any:
        def charged(sent: Any) -> Any:
            fleet = whole(sent)
            instances = sum(len(pool.instances) for pool in fleet.pools)
            self._charge(instances * self.instances * costs.FLEET_INSTANCE_S)
            return fleet

        return charged

    def _next_message(self, next_message: Any) -> Any:
        def charged(protocol: Any, now: float) -> Any:
            message = next_message(protocol, now)
            if message is not None and message.HasField("snapshot_chunk"):
                self._charge(len(message.snapshot_chunk.keys) * self.keys_of_one * costs.SENT_KEY_S)
            return message

        return charged


def _ratio(declared: int, built: int) -> float:
    return max(declared / built, 1.0)


def _smaller(count: int, ratio: float) -> int:
    return max(int(count / ratio), 1)
