"""Queries to all routers of a fleet: the owner of each pool for its requests, and all routers for decisions."""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc
import typer

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_cli.router_call import ask, call, fail, no_answer, sentence
from pointsman_common.io.whole_lists import whole
from pointsman_router.core.analysis.policy_comparison import MAX_CHANGES

# Timeout of a call, s.
TIMEOUT_S = 10.0

T = TypeVar("T")
Method = Callable[[fleet_pb2_grpc.FleetServiceStub], Callable[..., T]]


@dataclass(frozen=True)
class Routers:
    """The live routers of a fleet: their addresses by id, the owners' ids by pool, the id of the router that was `asked`, and the
    start times of their processes by id, ns, of those that tell it."""

    addresses: dict[str, str]
    owners: dict[str, str]
    asked: str
    started_ns: dict[str, int] = field(default_factory=dict)

    def owner_of(self, pool: str) -> str:
        """Return the id of the router that places a pool's requests; that of the asked one if no live router owns the pool."""
        owner = self.owners.get(pool, self.asked)
        return owner if owner in self.addresses else self.asked

    def silent(self, router_id: str, error: grpc.RpcError, missing: str) -> str:
        """Return a message that a router did not answer, and what is missing as a result."""
        address = self.addresses[router_id]
        return f"router {router_id} at {address} {sentence(error)}; {missing}"

    def warn(self, router_id: str, error: grpc.RpcError, missing: str) -> None:
        """Print the message of `silent` on stderr."""
        warn(self.silent(router_id, error, missing))


def warn(problem: str) -> None:
    """Print a problem on stderr."""
    typer.echo(f"pointsman: {problem}", err=True)


def routers_of(router: str) -> Routers:
    """Return the live routers of the fleet of `router`. Its own address in them is `router`. Raises grpc.RpcError."""
    answer = ask(router, lambda fleet: fleet.ListReplicas, fleet_pb2.ListReplicasRequest(), TIMEOUT_S)
    asked = answer.this_replica.router_id
    addresses = {replica.router_id: replica.address for replica in answer.replicas} | {asked: router}
    owners = {pool.model: pool.owner.router_id for pool in answer.pools if pool.HasField("owner")}
    started_ns = {
        replica.router_id: replica.start_time.ToNanoseconds()
        for replica in answer.replicas
        if replica.HasField("start_time")
    }
    return Routers(addresses, owners, asked, started_ns)


def reachable_routers(router: str) -> Routers:
    """The same as routers_of, but ends the program if the router does not answer."""
    try:
        return routers_of(router)
    except grpc.RpcError as error:
        no_answer(router, error)


def instances_of(router: str, model: str = "") -> tuple[fleet_pb2.ListInstancesResponse, list[str]]:
    """Return the instances as reported by the owners of their pools, and one message for each owner that does not answer. Only an
    owner knows a pool's requests and sessions, and it may know instances whose agents do not reach `router`; a pool of which
    `router` knows no instance is not asked for. Raises grpc.RpcError if `router` does not answer."""
    routers = routers_of(router)
    silent: list[str] = []
    answer = _list_instances(router, model)
    pools = {status.instance.model for status in answer.instances}
    others = {owner for pool, owner in routers.owners.items() if pool in pools and owner != routers.asked}
    for owner in sorted(others & routers.addresses.keys()):
        try:
            of_owner = _list_instances(routers.addresses[owner], model)
        except grpc.RpcError as error:
            owned = ", ".join(sorted(pool for pool, address in routers.owners.items() if address == owner))
            silent.append(
                routers.silent(owner, error, f"it places {owned}: requests and sessions there are not counted")
            )
            continue
        answer.held_requests += of_owner.held_requests
        known = {
            status.instance.instance_id: status
            for status in of_owner.instances
            if routers.owners.get(status.instance.model) == owner
        }
        for status in answer.instances:
            if (owners := known.pop(status.instance.instance_id, None)) is not None:
                status.CopyFrom(owners)
        answer.instances.extend(known.values())
    answer.instances.sort(key=lambda status: status.instance.instance_id)
    return answer, silent


def pool_policies(router: str) -> dict[str, fleet_pb2.PoolPolicy]:
    """Return the policy that decides for each pool, as the pools' owners report it, by pool. Ends the program if `router` does
    not answer; pools of other routers that do not answer are left out."""
    routers = reachable_routers(router)
    answers = _ask_all(
        routers, lambda fleet: fleet.ListReplicas, fleet_pb2.ListReplicasRequest(), "the policies of its pools"
    )
    pools = {pool.model: pool.policy for part in answers.values() for pool in part.pools if pool.HasField("policy")}
    return dict(sorted(pools.items()))


def at_owner(router: str, status: fleet_pb2.InstanceStatus) -> fleet_pb2.InstanceStatus:
    """Return `status`, which `router` reported, with the number of requests from the owner of its pool. Mutates `status`.

    Warns on stderr if the owner does not answer; ends the program if `router` does not.
    """
    routers = reachable_routers(router)
    owner = routers.owner_of(status.instance.model)
    if owner != routers.asked:
        try:
            status.num_requests = instance_at(routers.addresses[owner], status.instance.instance_id).num_requests
        except grpc.RpcError as error:
            routers.warn(owner, error, "its requests there are not counted")
    return status


def instance_at(router: str, instance_id: str) -> fleet_pb2.InstanceStatus:
    """Return an instance as one router sees it. Raises grpc.RpcError."""
    request = fleet_pb2.GetInstanceRequest(instance_id=instance_id)
    return ask(router, lambda fleet: fleet.GetInstance, request, TIMEOUT_S).instance


def newest_decisions(router: str, request: fleet_pb2.ListDecisionsRequest) -> fleet_pb2.ListDecisionsResponse:
    """Return the newest decisions of all routers that match `request`, at most `request.page_size`."""
    answers = _ask_all(reachable_routers(router), _pages_of_decisions, request)
    listed = [answer.decisions for answer in answers.values()]
    newest = heapq.merge(*listed, key=lambda decision: decision.time.ToNanoseconds(), reverse=True)
    return fleet_pb2.ListDecisionsResponse(decisions=itertools.islice(newest, request.page_size))


def of_its_router(router: str, decision_id: str, method: Method[T], request: object, timeout_s: float) -> T:
    """Return the answer of the router that has a decision, by decision id or request id. Ends the program if none has it."""
    routers = reachable_routers(router)
    maker = _maker(decision_id)
    for router_id in sorted(
        routers.addresses, key=lambda router_id: (router_id != maker, router_id != routers.asked, router_id)
    ):
        try:
            answer = ask(routers.addresses[router_id], method, request, timeout_s)
            break
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                continue
            if router_id == routers.asked:
                no_answer(router, error)
            routers.warn(router_id, error, "it may have the decision")
    else:
        why = f"NOT_FOUND: no decision {decision_id!r} at router {', '.join(sorted(routers.addresses))}"
        if maker and maker not in routers.addresses:
            why += f"; it would be of router {maker}, which is not alive: see its decision_log_file, if it has one"
        fail(why)
    return answer


def what_if_newest(router: str, request: fleet_pb2.WhatIfRequest, timeout_s: float) -> fleet_pb2.WhatIfResponse:
    """Make the newest `request.last` decisions of all routers again, each at the router that has it, and return the sums."""
    routers = reachable_routers(router)
    page = fleet_pb2.ListDecisionsRequest(page_size=request.last)
    listed = _ask_all(routers, _pages_of_decisions, page)
    made = (
        (decision.time.ToNanoseconds(), router_id)
        for router_id, answer in listed.items()
        for decision in answer.decisions
    )
    # Without any decision one router is called all the same, so that an unknown policy is reported.
    counts = Counter(router_id for _, router_id in heapq.nlargest(request.last, made)) or {routers.asked: request.last}
    total = fleet_pb2.WhatIfResponse()
    for router_id, count in sorted(counts.items()):
        part = fleet_pb2.WhatIfRequest(last=count, policy=request.policy)
        _add(total, call(routers.addresses[router_id], lambda fleet: fleet.WhatIf, part, timeout_s))
    return total


def _add(total: fleet_pb2.WhatIfResponse, part: fleet_pb2.WhatIfResponse) -> None:
    """Add the sums of `part` to `total`, also by group. Mutates `total`."""
    groups = {(group.route_class, group.reason): group for group in total.groups}
    for group in part.groups:
        key = group.route_class, group.reason
        _sum(groups[key] if key in groups else total.groups.add(route_class=key[0], reason=key[1]), group)
    total.groups.sort(key=lambda group: -group.decided)
    _sum(total, part)
    total.held += part.held
    total.changes.extend(part.changes[: MAX_CHANGES - len(total.changes)])


def _sum(total: Any, part: Any) -> None:
    total.decided += part.decided
    total.changed += part.changed
    total.cached_tokens_change += part.cached_tokens_change
    total.timed += part.timed
    total.ttft_change.FromNanoseconds(total.ttft_change.ToNanoseconds() + part.ttft_change.ToNanoseconds())


def _maker(decision_id: str) -> str:
    """Return the id of the router that made a decision. A decision id is ROUTER-NUMBER; "" for any other id."""
    found = re.fullmatch(r"(.+)-\d+", decision_id)
    return found[1] if found else ""


def _pages_of_decisions(fleet: fleet_pb2_grpc.FleetServiceStub) -> Callable[..., fleet_pb2.ListDecisionsResponse]:
    """Return ListDecisions with as many pages as `page_size` decisions take."""

    def listed(request: fleet_pb2.ListDecisionsRequest, **how: Any) -> fleet_pb2.ListDecisionsResponse:
        own = fleet_pb2.ListDecisionsRequest()  # the request is that to other routers, too
        own.CopyFrom(request)
        return whole(partial(fleet.ListDecisions, **how), own, "decisions", most=request.page_size)

    return listed


def _list_instances(router: str, model: str) -> fleet_pb2.ListInstancesResponse:
    return whole(
        lambda request: ask(router, lambda fleet: fleet.ListInstances, request, TIMEOUT_S),
        fleet_pb2.ListInstancesRequest(model=model),
        "instances",
    )


def _ask_all(routers: Routers, method: Method[T], request: object, missing: str = "its decisions") -> dict[str, T]:
    """Return the answers by router id. Ends the program if the router that the user named does not answer; warns of others, and
    that what is `missing` is not shown."""
    answers: dict[str, T] = {}
    for router_id, address in routers.addresses.items():
        try:
            answers[router_id] = ask(address, method, request, TIMEOUT_S)
        except grpc.RpcError as error:
            if router_id == routers.asked:
                no_answer(address, error)
            routers.warn(router_id, error, f"{missing} are missing here")
    return answers
