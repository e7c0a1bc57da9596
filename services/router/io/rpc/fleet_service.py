"""FleetService: the fleet now, and why requests went where they did."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.analysis.outcome_stats import OutcomeStats
from pointsman.router.core.analysis.policy_comparison import PolicyComparison
from pointsman.router.core.instances.instance_registry import InstanceRecord
from pointsman.router.core.policy.base import Policy, SettingError
from pointsman.router.core.policy.registry import POLICIES, make_policy
from pointsman.router.core.types import PolicyRef
from pointsman.router.io.convert import gateway_messages, operator_messages
from pointsman.router.io.convert.times import duration, timestamp
from pointsman.router.io.rpc.errors import abort, refusal_status, setting_status
from pointsman.router.io.runtime import ReplicaInfo, Router
from pointsman.router.io.telemetry.decision_log import DecisionFilter, LoggedDecision
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc

DEFAULT_PAGE = 50
MAX_PAGE = 1_000
DEFAULT_SUMMARIZED = 1_000
MAX_SUMMARIZED = 10_000
# Sessions are kept by the million, and looked through while placements wait.
SESSIONS_LOOKED_AT = 20_000
# Placements are answered after at most so long of a listing.
TURN_S = 0.001

T = TypeVar("T")


class FleetService(fleet_pb2_grpc.FleetServiceServicer):
    """Reads are answered by every replica; decisions are known to the replica that made them."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._started = time.monotonic()
        # A thousand decisions take seconds at a thousand instances: whoever asks meanwhile waits, and not each placement twice.
        self._deciding_again = asyncio.Lock()

    async def ListInstances(  # noqa: N802
        self, request: fleet_pb2.ListInstancesRequest, context: Any
    ) -> fleet_pb2.ListInstancesResponse:
        """All instances, or those of one model."""
        pool = self._router.state.instances.pool_of(request.model)
        return fleet_pb2.ListInstancesResponse(
            instances=[
                self._status(record)
                async for record in _in_turns(self._router.state.instances.records())
                if not request.model or record.info.model == pool
            ],
            policy=operator_messages.policy_to_wire(self._router.state.policy.ref()),
            router_id=self._router.settings.router_id,
            held_requests=len(self._router.state.held_requests.queue),
        )

    async def GetInstance(  # noqa: N802
        self, request: fleet_pb2.GetInstanceRequest, context: Any
    ) -> fleet_pb2.GetInstanceResponse:
        """One instance."""
        return fleet_pb2.GetInstanceResponse(instance=self._status(await self._instance(request.instance_id, context)))

    async def Drain(  # noqa: N802
        self, request: fleet_pb2.DrainRequest, context: Any
    ) -> fleet_pb2.DrainResponse:
        """Stop or resume placements on an instance, by all replicas."""
        record = await self._instance(request.instance_id, context)
        everywhere = await self._router.drain(record.info, request.resume)
        return fleet_pb2.DrainResponse(instance=self._status(record), this_replica_only=not everywhere)

    async def SetPolicy(  # noqa: N802
        self, request: fleet_pb2.SetPolicyRequest, context: Any
    ) -> fleet_pb2.SetPolicyResponse:
        """Change the policy of all replicas; everything else stays."""
        policy = await self._policy(request.policy, context)
        everywhere = await self._router.set_policy(policy)
        return fleet_pb2.SetPolicyResponse(
            policy=operator_messages.policy_to_wire(policy.ref()), this_replica_only=not everywhere
        )

    async def ListDecisions(  # noqa: N802
        self, request: fleet_pb2.ListDecisionsRequest, context: Any
    ) -> fleet_pb2.ListDecisionsResponse:
        """The newest decisions that match."""
        if request.page_size > MAX_PAGE:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"page_size: at most {MAX_PAGE}")
        wanted = _filter(request.filter)
        found = itertools.islice(self._router.decisions.newest(wanted.matches), request.page_size or DEFAULT_PAGE)
        return fleet_pb2.ListDecisionsResponse(
            decisions=[self.without_candidates(one) async for one in _in_turns(list(found))]
        )

    async def WatchDecisions(  # noqa: N802
        self, request: fleet_pb2.WatchDecisionsRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchDecisionsResponse]:
        """Decisions as they are made and as they end."""
        wanted = replace(_filter(request.filter), since_unix_s=0.0, until_unix_s=math.inf)
        queue = self._router.decisions.watch()
        try:
            while True:
                logged = await queue.get()
                if wanted.matches(logged):
                    yield fleet_pb2.WatchDecisionsResponse(decision=self.without_candidates(logged))
        finally:
            self._router.decisions.unwatch(queue)

    async def GetDecision(  # noqa: N802
        self, request: fleet_pb2.GetDecisionRequest, context: Any
    ) -> fleet_pb2.GetDecisionResponse:
        """One decision with all candidates."""
        logged = await self._logged(request.decision_id, context)
        return fleet_pb2.GetDecisionResponse(decision=self._decision(logged))

    async def Explain(  # noqa: N802
        self, request: fleet_pb2.ExplainRequest, context: Any
    ) -> fleet_pb2.ExplainResponse:
        """A dry run: decides, and reserves nothing."""
        policy = await self._policy(request.policy, context) if request.HasField("policy") else None
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
        """Recorded decisions made again under another policy, on what they saw then."""
        policy = await self._policy(request.policy, context)
        if request.decision_id:
            recorded = [await self._logged(request.decision_id, context)]
        elif request.last > MAX_PAGE:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"last: at most {MAX_PAGE}")
        else:
            newest = self._router.decisions.newest(lambda _: True)
            recorded = list(itertools.islice(newest, request.last or 1))
        async with self._deciding_again:
            made_again = [
                PolicyComparison(one.decision, self._router.state.what_if(one.decision, policy))
                async for one in _in_turns(recorded)
            ]
        return operator_messages.what_if_to_wire(made_again)

    async def SummarizeDecisions(  # noqa: N802
        self, request: fleet_pb2.SummarizeDecisionsRequest, context: Any
    ) -> fleet_pb2.SummarizeDecisionsResponse:
        """How the newest decisions that match ended."""
        if request.last > MAX_SUMMARIZED:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"last: at most {MAX_SUMMARIZED}")
        newest = self._router.decisions.newest(_filter(request.filter).matches)
        found = list(itertools.islice(newest, request.last or DEFAULT_SUMMARIZED))
        outcomes = OutcomeStats()
        async for one in _in_turns(found):
            outcomes.add(one.decision, one.outcome, one.finished)
        return fleet_pb2.SummarizeDecisionsResponse(
            decided=len(found),
            oldest=timestamp(found[-1].unix_s) if found else None,
            groups=operator_messages.groups_to_wire(outcomes.groups()),
        )

    async def ListSessions(  # noqa: N802
        self, request: fleet_pb2.ListSessionsRequest, context: Any
    ) -> fleet_pb2.ListSessionsResponse:
        """The lately used sessions that match, with their owners."""
        if request.page_size > MAX_PAGE:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"page_size: at most {MAX_PAGE}")
        affinity = self._router.state.affinity
        answer = fleet_pb2.ListSessionsResponse(total=len(affinity), time_to_live=duration(affinity.ttl_s))
        for model, session, owner, idle_s in itertools.islice(affinity.newest(time.monotonic()), SESSIONS_LOOKED_AT):
            if request.model in ("", model) and request.instance_id in ("", owner) and request.text in session:
                tenant, _, session_id = session.partition("/")
                answer.sessions.add(
                    tenant=tenant, session_id=session_id, model=model, instance_id=owner, idle=duration(idle_s)
                )
                if len(answer.sessions) == (request.page_size or DEFAULT_PAGE):
                    break
        return answer

    async def ListPolicies(  # noqa: N802
        self, request: fleet_pb2.ListPoliciesRequest, context: Any
    ) -> fleet_pb2.ListPoliciesResponse:
        """All policies with their settings."""
        return fleet_pb2.ListPoliciesResponse(policies=map(operator_messages.policy_description, POLICIES.values()))

    async def ListReplicas(  # noqa: N802
        self, request: fleet_pb2.ListReplicasRequest, context: Any
    ) -> fleet_pb2.ListReplicasResponse:
        """The live routers, the pools' owners, and this replica's own health."""
        state, store, now = self._router.state, self._router.store, asyncio.get_running_loop().time()
        answer = fleet_pb2.ListReplicasResponse(this_replica=self._router_status())
        for one in store.replicas():
            heartbeat_age = None if one.seen_at is None else duration(now - one.seen_at)
            replica_info = ReplicaInfo.read(one.replica_info)
            answer.replicas.add(
                router_id=one.router_id,
                address=one.address,
                heartbeat_age=heartbeat_age,
                policy=operator_messages.policy_to_wire(PolicyRef(*replica_info.policy))
                if replica_info.policy
                else None,
                console_url=replica_info.console_url,
            )
        for pool in state.instances.pools():
            answer.pools.add(
                model=pool.model,
                owner=gateway_messages.owner_to_wire(store.owner(pool.model)),
                instances=len(state.instances.members(pool.model, pool.model)),
                held_requests=state.held_requests.queue.count(pool.model),
            )
        return answer

    def _router_status(self) -> fleet_pb2.RouterStatus:
        router, state = self._router, self._router.state
        answered_at = router.store.answered_at
        silent_s = None if answered_at is None else asyncio.get_running_loop().time() - answered_at
        return fleet_pb2.RouterStatus(
            router_id=router.settings.router_id,
            uptime=duration(time.monotonic() - self._started),
            ready=router.ready,
            store=router.store.kind,
            degraded=state.degraded,
            store_answer_age=None if silent_s is None else duration(silent_s),
            gateways=len(router.gateways),
            agent_streams=len(router.agents),
            open_requests=len(state.reservations),
            held_requests=len(state.held_requests.queue),
            sessions=len(state.affinity),
            keys=len(state.index),
            decisions=len(router.decisions),
        )

    def _status(self, record: InstanceRecord) -> fleet_pb2.InstanceStatus:
        return operator_messages.instance_status(self._router.state, record, time.monotonic())

    def without_candidates(self, logged: LoggedDecision) -> fleet_pb2.Decision:
        """A decision as WatchDecisions tells it."""
        return self._decision(logged, candidates=False)

    def _decision(self, logged: LoggedDecision, *, candidates: bool = True) -> fleet_pb2.Decision:
        return operator_messages.decision_to_wire(self._router.state, logged, candidates=candidates)

    async def _instance(self, instance_id: str, context: Any) -> InstanceRecord:
        record = self._router.state.instances.get(instance_id)
        if record is None:
            await _not_found(context, f"no instance {instance_id!r}")
        return record

    async def _logged(self, decision_id: str, context: Any) -> LoggedDecision:
        logged = self._router.decisions.get(decision_id)
        if logged is None:
            await _not_found(context, f"no decision {decision_id!r} in this router's log")
        return logged

    async def _policy(self, wire: fleet_pb2.Policy, context: Any) -> Policy:
        try:
            return make_policy(wire.name, operator_messages.policy_settings(wire.settings))
        except SettingError as error:
            await abort(context, setting_status(error))


async def _in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a turn for the others whenever they have taken TURN_S."""
    until = time.perf_counter() + TURN_S
    for item in items:
        yield item
        if time.perf_counter() > until:
            await asyncio.sleep(0)
            until = time.perf_counter() + TURN_S


async def _not_found(context: Any, message: str) -> NoReturn:
    await context.abort(grpc.StatusCode.NOT_FOUND, message)
    raise AssertionError("abort raises")


def _filter(wire: fleet_pb2.DecisionFilter) -> DecisionFilter:
    now = time.time()
    return DecisionFilter(
        session_id=wire.session_id,
        instance_id=wire.instance_id,
        route_class=wire.route_class,
        reason=wire.reason,
        request_id=wire.request_id,
        since_unix_s=now - wire.since.ToNanoseconds() / 1e9 if wire.HasField("since") else 0.0,
        until_unix_s=now - wire.until.ToNanoseconds() / 1e9 if wire.HasField("until") else math.inf,
    )
