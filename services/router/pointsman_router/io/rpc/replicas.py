"""Builds the response of ListReplicas: the live routers, the pools' owners, and the health of the router that answers."""

from __future__ import annotations

import asyncio
import time

from pointsman.router.v1 import fleet_pb2
from pointsman_router.core.placement_types import PolicyRef
from pointsman_router.io.convert import gateway_messages, operator_messages
from pointsman_router.io.convert.times import duration, timestamp
from pointsman_router.io.router import VERSION, ReplicaInfo, Router


def replicas_to_wire(router: Router) -> fleet_pb2.ListReplicasResponse:
    """Return the control plane as `router` sees it."""
    state, store, now = router.state, router.store, asyncio.get_running_loop().time()
    answer = fleet_pb2.ListReplicasResponse(this_replica=_router_status(router))
    for replica in store.replicas():
        heartbeat_age = None if replica.seen_at is None else duration(now - replica.seen_at)
        replica_info = ReplicaInfo.read(replica.replica_info)
        answer.replicas.add(
            router_id=replica.router_id,
            address=replica.address,
            heartbeat_age=heartbeat_age,
            policy=operator_messages.policy_to_wire(PolicyRef(*replica_info.policy)) if replica_info.policy else None,
            console_url=replica_info.console_url,
            version=replica_info.version,
            start_time=None if replica_info.started_at is None else timestamp(replica_info.started_at),
            open_requests=replica_info.open_requests,
            held_requests=replica_info.held_requests,
            gateways=replica_info.gateways,
            policy_problem=replica_info.policy_problem,
        )
    for replica in store.lost_replicas():
        age = None if replica.seen_at is None else duration(now - replica.seen_at)
        answer.lost_replicas.add(router_id=replica.router_id, heartbeat_age=age)
    for unix_s, taken in reversed(router.policy_changes):
        answer.policy_changes.append(operator_messages.policy_change_to_wire(unix_s, taken))
    for gateway_id, stream in sorted(router.gateways.items()):
        answer.gateways.add(gateway_id=gateway_id, url=stream.url, address=stream.address)
    for pool in state.instances.pools():
        owned = state.owned.owns(pool.model)
        answer.pools.add(
            model=pool.model,
            owner=gateway_messages.owner_to_wire(store.owner(pool.model)),
            instances=len(state.instances.members(pool.model, pool.model)),
            held_requests=state.held_requests.queue.count(pool.model),
            policy=operator_messages.pool_policy_to_wire(state.pool_policy(pool.model, now), now) if owned else None,
            parked_requests=state.parked_requests.queue.count(pool.model),
            admission=operator_messages.admission_status(state, pool.model, now),
        )
    return answer


def _router_status(router: Router) -> fleet_pb2.RouterStatus:
    state, answered_at = router.state, router.store.answered_at
    silent_s = None if answered_at is None else asyncio.get_running_loop().time() - answered_at
    return fleet_pb2.RouterStatus(
        router_id=router.settings.router_id,
        uptime=duration(time.monotonic() - router.history.since),
        version=VERSION,
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
        parked_requests=len(state.parked_requests.queue),
    )
