"""Operators' orders for one instance: `pointsman drain`, `cordon`, `uncordon` and `weight`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import grpc
import typer

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_cli.all_routers import at_owner, instance_at, routers_of
from pointsman_cli.router_call import DEFAULT_ROUTER, call, credentials, dial, no_answer, router_of, seconds_of
from pointsman_common.io.whole_lists import whole

# Timeout of a call, and time between two looks at an instance that is drained, s.
TIMEOUT_S = 10.0
WAIT_STEP_S = 0.5

_MAY_COME_BACK = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.NOT_FOUND)
_TAKES_REQUESTS = (fleet_pb2.INSTANCE_STATE_READY, fleet_pb2.INSTANCE_STATE_SYNCING)
_TAKES_NOTHING = (fleet_pb2.INSTANCE_STATE_DRAINING, fleet_pb2.INSTANCE_STATE_CORDONED)

RouterFlag = Annotated[
    str,
    typer.Option(
        envvar="POINTSMAN_ROUTER",
        callback=router_of,
        help="a router: HOST, HOST:PORT, a URL, unix:PATH or another target of gRPC; of several, with commas between, the first "
        "that can be reached is asked",
    ),
]
InstanceArgument = Annotated[str, typer.Argument(help="id of the instance, as `pointsman instances` lists it")]
ReasonFlag = Annotated[
    str | None, typer.Option(help="reason to show with the order; default: the reason given before, if any")
]


def drain(
    instance_id: InstanceArgument,
    router: RouterFlag = DEFAULT_ROUTER,
    resume: Annotated[bool, typer.Option(help="undo a drain")] = False,
    move: Annotated[
        bool, typer.Option(help="let its requests go on at other instances, as fast as these take them")
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            callback=seconds_of,
            help="seconds to wait until it has no requests or has left; exit status 1 if it still has",
        ),
    ] = 0.0,
) -> None:
    """Stop placing on an instance until its engine restarts, or until --resume.

    Applies to all routers that share a Redis. Prints the number of requests that the instance still has. With --move, streams go
    on elsewhere; what cannot (services/gateway/README.md has the table) continues to its end.

    Unlike a drain, a `cordon` continues after a restart.
    """
    if resume and (move or wait):
        raise typer.BadParameter("cannot be combined with --move and --wait", param_hint="--resume")
    request = fleet_pb2.DrainRequest(instance_id=instance_id, resume=resume, move=move)
    answer = call(router, lambda fleet: fleet.Drain, request, TIMEOUT_S)
    status = at_owner(router, answer.instance)
    typer.echo(_now(status))
    if not resume:
        _warn_if_last(router, status, f"pointsman drain {instance_id} --resume")
    _say_if_alone(answer.this_replica_only)
    if move and not answer.moving:
        typer.echo("the router's version cannot move requests: they continue to their end", err=True)
    if wait and not _emptied(router, status, wait):
        raise typer.Exit(1)


def cordon(
    instance_id: InstanceArgument,
    router: RouterFlag = DEFAULT_ROUTER,
    reason: ReasonFlag = None,
) -> None:
    """Stop placing on an instance until `uncordon`.

    Applies to all routers that share a Redis, and continues after restarts of engines and routers. The instance need not be known
    yet. Its running requests continue to their end.
    """
    _order(router, instance_id, reason, cordoned=True)


def uncordon(instance_id: InstanceArgument, router: RouterFlag = DEFAULT_ROUTER) -> None:
    """Place on an instance again after `cordon`.

    The instance's weight does not change.
    """
    _order(router, instance_id, None, cordoned=False)


def weight(
    instance_id: InstanceArgument,
    weight: Annotated[float, typer.Argument(help="part of its fair share of new sessions, 0 to 1")],
    router: RouterFlag = DEFAULT_ROUTER,
    reason: ReasonFlag = None,
) -> None:
    """Limit an instance to a part of its fair share of new sessions.

    0: no new sessions; 1: the whole share. The weight applies until it is changed. Existing sessions stay on the instance.
    """
    _order(router, instance_id, reason, weight=weight)


def order_words(order: fleet_pb2.InstanceOrder | fleet_pb2.InstanceStatus) -> str:
    """Return an instance's orders as text: "cordoned: a new disk, weight 0.1: canary"; "" without an order."""
    return ", ".join(
        filter(None, (_with_reason("cordoned", order.cordon_reason) if order.cordoned else "", weight_words(order)))
    )


def weight_words(order: fleet_pb2.InstanceOrder | fleet_pb2.InstanceStatus) -> str:
    """Return an ordered weight as text: "weight 0.1: canary"; "" without one."""
    # The field is absent in answers of routers whose version has no weights.
    if not order.HasField("weight") or order.weight == 1:
        return ""
    return _with_reason(f"weight {order.weight:g}", order.weight_reason)


def _with_reason(ordered: str, reason: str) -> str:
    return f"{ordered}: {reason}" if reason else ordered


def state_words(status: fleet_pb2.InstanceStatus) -> str:
    """Return an instance's state as text. A cordon or drain is followed by the underlying state, unless that is READY:
    "CORDONED, UNHEALTHY"."""
    shown = [status.state]
    if status.underlying_state not in (
        status.state,
        fleet_pb2.INSTANCE_STATE_READY,
        fleet_pb2.INSTANCE_STATE_UNSPECIFIED,
    ):
        shown.append(status.underlying_state)
    return ", ".join(fleet_pb2.InstanceState.Name(state).removeprefix("INSTANCE_STATE_") for state in shown)


def answering_of(pool: Sequence[fleet_pb2.InstanceStatus]) -> list[fleet_pb2.InstanceStatus]:
    """Return the instances of a pool that answer requests: those that only produce KV do so where the pool has no others."""
    others = [status for status in pool if status.instance.kv_transfer.role != agent_pb2.KV_ROLE_PRODUCER]
    return others or list(pool)


def suspension(status: fleet_pb2.InstanceStatus) -> str:
    """Return why an instance's engine computes nothing: "asleep: ..."; "" unless the instance is suspended."""
    suspended = fleet_pb2.INSTANCE_STATE_SUSPENDED in (status.state, status.underlying_state)
    return status.load.suspended if suspended else ""


def engine_count(answer: fleet_pb2.ListInstancesResponse) -> str:
    """Return how many of the engines that agents follow have instances: "63 of 64 engines"."""
    present = len({status.instance.url for status in answer.instances})
    return f"{present} of {present + len(answer.absent_engines)} engines"


def absent_lines(answer: fleet_pb2.ListInstancesResponse) -> list[str]:
    """Return how many engines have instances, and a line for each that has none; no lines if all have."""
    if not answer.absent_engines:
        return []
    absent = [
        f"{engine.url}: no instance: {engine.problem} (agent on {engine.node})" for engine in answer.absent_engines
    ]
    return [f"{engine_count(answer)} have instances", *absent]


def orders_of(router: str) -> list[fleet_pb2.InstanceOrder]:
    """Return all orders in the order of instance ids; none if the router's version has no orders. Raises grpc.RpcError."""
    with dial(router) as channel:
        list_orders = fleet_pb2_grpc.FleetServiceStub(channel).ListInstanceOrders
        shown = credentials()
        try:
            answer = whole(
                lambda request: list_orders(request, timeout=TIMEOUT_S, metadata=shown),
                fleet_pb2.ListInstanceOrdersRequest(),
                "orders",
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return []
            raise
    return list(answer.orders)


def _order(router: str, instance_id: str, reason: str | None, **changes: Any) -> None:
    request = fleet_pb2.SetInstanceOrderRequest(instance_id=instance_id, reason=reason, **changes)
    answer = call(router, lambda fleet: fleet.SetInstanceOrder, request, TIMEOUT_S)
    ordered = order_words(answer.order)
    if answer.HasField("instance"):
        typer.echo(_now(at_owner(router, answer.instance)) + (f" ({ordered})" if ordered else ""))
        if changes.get("cordoned"):
            _warn_if_last(router, answer.instance, f"pointsman uncordon {instance_id}")
    else:
        typer.echo(f"{instance_id}: no agent reports it ({ordered or 'it has no orders'})")
    _say_if_alone(answer.this_replica_only)


def _warn_if_last(router: str, status: fleet_pb2.InstanceStatus, remedy: str) -> None:
    """Warn on stderr if no instance that answers requests of the pool of `status`, which takes nothing new from now on, is
    ready."""
    model = status.instance.model
    listed = whole(
        lambda request: call(router, lambda fleet: fleet.ListInstances, request, TIMEOUT_S),
        fleet_pb2.ListInstancesRequest(model=model),
        "instances",
    )
    if not any(other.state in _TAKES_REQUESTS for other in answering_of(listed.instances)):
        typer.echo(
            f"warning: no instance of {model} can answer now: new requests for it may get 503, until one can or until you run "
            f"`{remedy}`",
            err=True,
        )


def _emptied(router: str, status: fleet_pb2.InstanceStatus, wait_s: float) -> bool:
    """Wait until an instance has no requests open, for at most `wait_s`, and print how many are. Return whether it has none, as
    one that has left the fleet. Routers may restart meanwhile: one that does not answer is asked again, and only a process that
    has known the instance tells that it has left. Ends the program with status 1 if the owner does not answer at the end."""
    ends = time.monotonic() + wait_s
    model, instance_id, printed = status.instance.model, status.instance.instance_id, status.num_requests
    knew: set[tuple[str, int]] = set()
    while True:
        problem, process = None, None
        try:
            routers = routers_of(router)
            owner = routers.owner_of(model)
            process = owner, routers.started_ns.get(owner, 0)
            status = instance_at(routers.addresses[owner], instance_id)
            knew.add(process)
            # Until the owner knows of the drain it may still place requests there.
            if status.state in _TAKES_NOTHING:
                if status.num_requests != printed:
                    printed = status.num_requests
                    typer.echo(_now(status))
                if not printed:
                    return True
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND and process in knew:
                typer.echo(f"{instance_id} has left the fleet")
                return True
            if error.code() not in _MAY_COME_BACK:
                no_answer(router, error)
            problem = error
        if (left := ends - time.monotonic()) <= 0:
            if problem is not None:
                no_answer(router, problem)
            return False
        time.sleep(min(WAIT_STEP_S, left))


def _now(status: fleet_pb2.InstanceStatus) -> str:
    return f"{status.instance.instance_id} is {state_words(status)}, {status.num_requests} requests open"


def _say_if_alone(this_replica_only: bool) -> None:
    if this_replica_only:
        typer.echo("the router's Redis is not reachable; other routers follow when it is reachable again", err=True)
