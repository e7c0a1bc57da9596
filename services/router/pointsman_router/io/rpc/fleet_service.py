"""FleetService: the API for operators, with the fleet's state, the decisions and their reasons, and operators' orders."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any, NamedTuple

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_common.core.enum_words import word
from pointsman_common.core.session_names import tenant_and_id
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.outcome_stats import OutcomeStats
from pointsman_router.core.analysis.policy_comparison import PolicyComparison
from pointsman_router.core.analysis.session_turns import SessionTurns
from pointsman_router.core.instances.instance_orders import (
    MAX_ORDERS,
    NO_ORDER,
    InvalidOrder,
    TooManyOrders,
    check_change,
)
from pointsman_router.core.instances.instance_registry import InstanceRecord
from pointsman_router.core.policy.base import Policy, SettingError
from pointsman_router.core.policy.reasons import REASONS, ROUTE_CLASSES
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.io.convert import gateway_messages, operator_messages
from pointsman_router.io.convert.times import duration, timestamp
from pointsman_router.io.router import PolicyChanged, Router
from pointsman_router.io.rpc.errors import (
    abort,
    field_status,
    not_found_status,
    policy_changed_status,
    refusal_status,
    setting_status,
    too_many_orders_status,
)
from pointsman_router.io.rpc.history_lists import HistoryLists
from pointsman_router.io.rpc.paged_lists import in_turns, messages_of
from pointsman_router.io.rpc.pages import MAX_PAGE
from pointsman_router.io.rpc.replicas import replicas_to_wire
from pointsman_router.io.telemetry.decision_log import DecisionFilter, LoggedDecision

# Default number of decisions that SummarizeDecisions reads.
DEFAULT_SUMMARIZED = 1_000
# Maximum number of decisions that SummarizeDecisions reads.
MAX_SUMMARIZED = 10_000
# Maximum number of sessions that one ListSessions call examines. A router may know a million, and placements share its loop.
SESSIONS_LOOKED_AT = 20_000


class SessionPosition(NamedTuple):
    """A session's position in the order of last use: time of last use (monotonic s), and its rank among sessions with the same
    time, from 1."""

    used_at: float
    number: int

    def precedes(self, other: SessionPosition) -> bool:
        """Return whether this position is listed before `other`."""
        return (-self.used_at, self.number) < (-other.used_at, other.number)


class FleetService(HistoryLists, fleet_pb2_grpc.FleetServiceServicer):
    """The service that operators, the CLI and the console use. Every replica answers reads; only the replica that made a decision
    has it in its log."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        # WhatIf over a thousand decisions takes seconds with a thousand instances. Concurrent calls wait for each other, so that
        # together they do not delay placements more than one call does.
        self._deciding_again = asyncio.Lock()

    async def ListInstances(  # noqa: N802
        self, request: fleet_pb2.ListInstancesRequest, context: Any
    ) -> fleet_pb2.ListInstancesResponse:
        """Return all instances, or those of one model, ordered by id."""
        size, after = await self._page(request, str, context, default=MAX_PAGE)
        pool = self._router.state.instances.pool_of(request.model)
        found = [
            record
            for record in self._router.state.instances.records()
            if (not request.model or record.info.model == pool) and (after is None or record.info.instance_id > after)
        ]
        # In a pause instances may leave.
        known = self._router.state.instances.get
        listed, entries = await messages_of(
            found[:size], lambda record: self._status(record) if known(record.info.instance_id) is record else None
        )
        policy = self._router.state.policy.ref()
        return fleet_pb2.ListInstancesResponse(
            instances=listed,
            policy=operator_messages.policy_to_wire(policy),
            policy_etag=operator_messages.policy_etag(policy),
            router_id=self._router.settings.router_id,
            held_requests=len(self._router.state.held_requests.queue),
            next_page_token=self._next_page(found, entries, lambda record: record.info.instance_id, request),
            absent_engines=[
                agent_pb2.AbsentEngine(**asdict(engine))
                for engine in (self._router.absent() if not request.model and after is None else ())
            ],
        )

    async def GetInstance(  # noqa: N802
        self, request: fleet_pb2.GetInstanceRequest, context: Any
    ) -> fleet_pb2.GetInstanceResponse:
        """Return one instance."""
        return fleet_pb2.GetInstanceResponse(instance=self._status(await self._instance(request.instance_id, context)))

    async def Drain(  # noqa: N802
        self, request: fleet_pb2.DrainRequest, context: Any
    ) -> fleet_pb2.DrainResponse:
        """Stop or resume placements on an instance at all replicas, and let its requests leave it."""
        record = await self._instance(request.instance_id, context)
        everywhere = await self._router.drain(record.info, resume=request.resume, move=request.move)
        return fleet_pb2.DrainResponse(
            instance=self._status(record), moving=request.move and not request.resume, this_replica_only=not everywhere
        )

    async def SetInstanceOrder(  # noqa: N802
        self, request: fleet_pb2.SetInstanceOrderRequest, context: Any
    ) -> fleet_pb2.SetInstanceOrderResponse:
        """Set or lift an instance's cordon, or change its weight, at all replicas."""
        change = operator_messages.order_change(request, time.time())
        try:
            check_change(change)
            everywhere = await self._router.set_instance_order(change)
        except InvalidOrder as error:
            await abort(context, field_status(error.field, error.message))
        except TooManyOrders:
            await abort(context, too_many_orders_status(MAX_ORDERS))
        record = self._router.state.instances.get(change.instance_id)
        return fleet_pb2.SetInstanceOrderResponse(
            order=self._order(change.instance_id),
            instance=None if record is None else self._status(record),
            this_replica_only=not everywhere,
        )

    async def ListInstanceOrders(  # noqa: N802
        self, request: fleet_pb2.ListInstanceOrdersRequest, context: Any
    ) -> fleet_pb2.ListInstanceOrdersResponse:
        """Return all orders ordered by instance id, including those for unknown instances."""
        size, after = await self._page(request, str, context, default=MAX_PAGE)
        found = sorted(name for name in self._router.state.instances.orders if after is None or name > after)
        return fleet_pb2.ListInstanceOrdersResponse(
            orders=[self._order(name) async for name in in_turns(found[:size])],
            next_page_token=self._next_page(found, size, str, request),
        )

    async def SetPolicy(  # noqa: N802
        self, request: fleet_pb2.SetPolicyRequest, context: Any
    ) -> fleet_pb2.SetPolicyResponse:
        """Change the policy of all replicas. Nothing else changes."""
        policy = await self._policy(request.policy, context)
        try:
            everywhere = await self._router.set_policy(policy, request.etag)
        except PolicyChanged as changed:
            await abort(context, policy_changed_status(changed.etag))
        return fleet_pb2.SetPolicyResponse(
            policy=operator_messages.policy_to_wire(policy.ref()),
            etag=operator_messages.policy_etag(policy.ref()),
            this_replica_only=not everywhere,
        )

    async def ListDecisions(  # noqa: N802
        self, request: fleet_pb2.ListDecisionsRequest, context: Any
    ) -> fleet_pb2.ListDecisionsResponse:
        """Return the newest decisions that match, newest first."""
        size, before = await self._page(request, int, context)
        found = await self._newest(self._filter(request.filter), size + 1, before)
        listed, entries = await messages_of(found[:size], self.without_candidates)
        return fleet_pb2.ListDecisionsResponse(
            decisions=listed, next_page_token=self._next_page(found, entries, attrgetter("number"), request)
        )

    async def WatchDecisions(  # noqa: N802
        self, request: fleet_pb2.WatchDecisionsRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchDecisionsResponse]:
        """Stream matching decisions when they are made, noted or ended."""
        wanted = replace(self._filter(request.filter), since_unix_s=0.0, until_unix_s=math.inf)
        watch = self._router.decisions.watch(wanted.matches)
        try:
            # Without this, metadata is sent with the first decision, and a client cannot know when the watch has begun.
            await context.send_initial_metadata(())
            while True:
                logged, dropped = await watch.next()
                yield fleet_pb2.WatchDecisionsResponse(decision=self.without_candidates(logged), dropped=dropped)
        finally:
            self._router.decisions.unwatch(watch)

    async def GetDecision(  # noqa: N802
        self, request: fleet_pb2.GetDecisionRequest, context: Any
    ) -> fleet_pb2.GetDecisionResponse:
        """Return one decision with all its candidates."""
        logged = await self._logged(request.decision_id, context)
        return fleet_pb2.GetDecisionResponse(decision=self._decision(logged))

    async def Explain(  # noqa: N802
        self, request: fleet_pb2.ExplainRequest, context: Any
    ) -> fleet_pb2.ExplainResponse:
        """Return the decision that would be made for a request. Reserves nothing."""
        policy = await self._policy(request.policy, context) if request.HasField("policy") else None
        if (fault := gateway_messages.keys_fault(request.request)) is not None:
            await abort(context, field_status(f"request.{fault[0]}", fault[1]))
        started = time.perf_counter()
        decision = self._router.state.explain(
            gateway_messages.placement_request(request.request), time.monotonic(), policy
        )
        if isinstance(decision, ev.Refused):
            await abort(context, refusal_status(decision, self._router.owner_elsewhere(decision)))
        logged = LoggedDecision(decision, time.time(), time.perf_counter() - started, dry_run=True)
        return fleet_pb2.ExplainResponse(decision=self._decision(logged))

    async def WhatIf(  # noqa: N802
        self, request: fleet_pb2.WhatIfRequest, context: Any
    ) -> fleet_pb2.WhatIfResponse:
        """Make recorded decisions again under another policy, on the view that they saw, and compare."""
        policy = await self._policy(request.policy, context)
        if request.decision_id:
            recorded = [await self._logged(request.decision_id, context)]
        elif request.last > MAX_PAGE:
            await abort(context, field_status("last", f"at most {MAX_PAGE}"))
        else:
            newest = self._router.decisions.newest(lambda _: True)
            recorded = list(itertools.islice(newest, request.last or 1))
        comparison = PolicyComparison()
        async with self._deciding_again:
            async for logged in in_turns(recorded):
                comparison.add(logged.decision, self._router.state.what_if(logged.decision, policy))
        answer = operator_messages.what_if_to_wire(comparison)
        async for was, would in in_turns(comparison.changes):
            answer.changes.append(operator_messages.changed_to_wire(was, would))
        return answer

    async def SummarizeDecisions(  # noqa: N802
        self, request: fleet_pb2.SummarizeDecisionsRequest, context: Any
    ) -> fleet_pb2.SummarizeDecisionsResponse:
        """Return statistics of how the newest decisions that match ended."""
        if request.last > MAX_SUMMARIZED:
            await abort(context, field_status("last", f"at most {MAX_SUMMARIZED}"))
        found = await self._newest(self._filter(request.filter), request.last or DEFAULT_SUMMARIZED)
        outcomes = OutcomeStats()
        async for logged in in_turns(found):
            outcomes.add(logged.decision, logged.outcome, logged.finished)
        return fleet_pb2.SummarizeDecisionsResponse(
            decided=len(found),
            oldest=timestamp(found[-1].unix_s) if found else None,
            groups=map(operator_messages.group_to_wire, outcomes.groups()),
            total=operator_messages.group_to_wire(outcomes.total) if found else None,
        )

    async def ListSessions(  # noqa: N802
        self, request: fleet_pb2.ListSessionsRequest, context: Any
    ) -> fleet_pb2.ListSessionsResponse:
        """Return the most recently used sessions that match, with their owners."""
        size, after = await self._page(request, SessionPosition, context)
        affinity, now, pool = self._router.state.affinity, time.monotonic(), self._pool(request.model)
        answer = fleet_pb2.ListSessionsResponse(
            total=len(affinity), time_to_live=duration(affinity.ttl_s), ended=affinity.ended_count
        )
        here = last = SessionPosition(math.inf, 0)
        names: list[tuple[str, str]] = []
        newest = itertools.islice(affinity.newest(now), SESSIONS_LOOKED_AT)
        async for model, session, owner, used_at in in_turns(newest):
            here = SessionPosition(used_at, here.number + 1 if used_at == here.used_at else 1)
            if after is not None and not after.precedes(here):
                continue
            if (
                pool in ("", model)
                and request.instance_id in ("", owner)
                and (not request.text or request.text in _shown(session))
            ):
                if len(answer.sessions) == size:
                    answer.next_page_token = self._token(last, request)
                    break
                last = here
                tenant, session_id = tenant_and_id(session)
                answer.sessions.add(
                    tenant=tenant, session_id=session_id, model=model, instance_id=owner, idle=duration(now - used_at)
                )
                names.append((model, session))
        await self._count_turns(names, answer)
        return answer

    async def _count_turns(self, names: list[tuple[str, str]], answer: fleet_pb2.ListSessionsResponse) -> None:
        """Add the log's figures to the sessions of `answer`, which have these pools and names. Mutates `answer`."""
        logged = self._router.decisions.all()
        if not logged:
            return
        answer.counted_since.CopyFrom(timestamp(logged[-1].unix_s))
        if not names:
            return
        counted = SessionTurns(names)
        async for decided in in_turns(logged):
            counted.add(decided.decision, decided.finished)
        for wire, name in zip(answer.sessions, names, strict=True):
            turns = counted.of(*name)
            wire.turns, wire.input_tokens = turns.turns, turns.input_tokens
            wire.cached_tokens, wire.last_input_tokens = turns.cached_tokens, turns.last_input_tokens

    async def ListPolicies(  # noqa: N802
        self, request: fleet_pb2.ListPoliciesRequest, context: Any
    ) -> fleet_pb2.ListPoliciesResponse:
        """Return all policies with their settings, and the meanings of reasons and route classes."""
        return fleet_pb2.ListPoliciesResponse(
            policies=map(operator_messages.policy_description, self._router.policies.values()),
            reasons=REASONS,
            route_classes=ROUTE_CLASSES,
        )

    async def ListReplicas(  # noqa: N802
        self, request: fleet_pb2.ListReplicasRequest, context: Any
    ) -> fleet_pb2.ListReplicasResponse:
        """Return the live routers, the pools' owners, and this replica's health."""
        return replicas_to_wire(self._router)

    def _status(self, record: InstanceRecord) -> fleet_pb2.InstanceStatus:
        return operator_messages.instance_status(self._router.state, record, time.monotonic())

    def _order(self, instance_id: str) -> fleet_pb2.InstanceOrder:
        instances = self._router.state.instances
        known = instances.get(instance_id) is not None
        return operator_messages.order_to_wire(instance_id, instances.orders.get(instance_id, NO_ORDER), known=known)

    def without_candidates(self, logged: LoggedDecision) -> fleet_pb2.Decision:
        """Return a decision as WatchDecisions sends it: without candidates."""
        return self._decision(logged, candidates=False)

    def _decision(self, logged: LoggedDecision, *, candidates: bool = True) -> fleet_pb2.Decision:
        return operator_messages.decision_to_wire(self._router.state, logged, candidates=candidates)

    async def _instance(self, instance_id: str, context: Any) -> InstanceRecord:
        record = self._router.state.instances.get(instance_id)
        if record is None:
            message = f"no instance {instance_id!r} (`pointsman instances` lists those that there are)"
            await abort(context, not_found_status("instance", instance_id, message))
        return record

    async def _logged(self, decision_id: str, context: Any) -> LoggedDecision:
        logged = self._router.decisions.get(decision_id)
        if logged is None:
            message = f"no decision {decision_id!r} in this router's log"
            await abort(context, not_found_status("decision", decision_id, message))
        return logged

    def _filter(self, wire: fleet_pb2.DecisionFilter) -> DecisionFilter:
        now = time.time()
        return DecisionFilter(
            session_id=wire.session_id,
            instance_id=wire.instance_id,
            route_class=word(fleet_pb2.RouteClass, wire.route_class),
            reason=wire.reason,
            request_id=wire.request_id,
            outcome=word(fleet_pb2.DecisionOutcome, wire.outcome),
            tenant=wire.tenant,
            # Any name of the model, as in ListInstances.
            model=self._pool(wire.model),
            since_unix_s=now - wire.since.ToNanoseconds() / 1e9 if wire.HasField("since") else 0.0,
            until_unix_s=now - wire.until.ToNanoseconds() / 1e9 if wire.HasField("until") else math.inf,
        )

    async def _newest(self, wanted: DecisionFilter, most: int, before: int | None = None) -> list[LoggedDecision]:
        """Return the newest decisions that match, `most` at most, newest first; with `before`, those with a smaller `number`."""
        found: list[LoggedDecision] = []
        async for logged in in_turns(self._router.decisions.all()):
            if (before is None or logged.number < before) and wanted.matches(logged):
                found.append(logged)
                if len(found) == most:
                    break
        return found

    async def _policy(self, wire: fleet_pb2.Policy, context: Any) -> Policy:
        try:
            return make_policy(wire.name, operator_messages.policy_settings(wire.settings), self._router.policies)
        except SettingError as error:
            await abort(context, setting_status(error))


def _shown(session: str) -> str:
    return "/".join(tenant_and_id(session))
