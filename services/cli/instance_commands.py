"""What operators order for one instance: `pointsman drain`, `cordon`, `uncordon` and `weight`."""

from __future__ import annotations

from typing import Annotated, Any

import grpc
import typer

from pointsman.cli.all_routers import at_owner
from pointsman.cli.router_call import DEFAULT_ROUTER, call, credentials, dial
from pointsman.common.io.pages import whole
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc

TIMEOUT_S = 10.0

RouterFlag = Annotated[str, typer.Option(envvar="POINTSMAN_ROUTER", help="HOST:PORT of a router")]
ReasonFlag = Annotated[
    str | None, typer.Option(help="why, for others who look; without it one that was given before stays")
]


def drain(
    instance_id: str,
    router: RouterFlag = DEFAULT_ROUTER,
    resume: Annotated[bool, typer.Option(help="undo a drain")] = False,
) -> None:
    """Stop placing on an instance until its engine restarts (or resume), by all routers that share a Redis; tells how many
    requests it still has. `cordon` outlasts the restart."""
    request = fleet_pb2.DrainRequest(instance_id=instance_id, resume=resume)
    answer = call(router, lambda fleet: fleet.Drain, request, TIMEOUT_S)
    typer.echo(_now(at_owner(router, answer.instance)))
    _say_if_alone(answer.this_replica_only)


def cordon(
    instance_id: str,
    router: RouterFlag = DEFAULT_ROUTER,
    reason: ReasonFlag = None,
) -> None:
    """Stop placing on an instance until `uncordon`, whatever restarts, by all routers that share a Redis. Its id need not be
    known yet. What runs there goes on to its end."""
    _order(router, instance_id, reason, cordoned=True)


def uncordon(instance_id: str, router: RouterFlag = DEFAULT_ROUTER) -> None:
    """Let an instance in again after `cordon`. Its weight stays as it is."""
    _order(router, instance_id, None, cordoned=False)


def weight(
    instance_id: str,
    weight: Annotated[float, typer.Argument(help="0 to 1: the part of its fair share of new sessions that it gets")],
    router: RouterFlag = DEFAULT_ROUTER,
    reason: ReasonFlag = None,
) -> None:
    """Give an instance only a part of its fair share of new sessions (0: none, 1: all of it again), until it is given another.
    Sessions that live there stay."""
    _order(router, instance_id, reason, weight=weight)


def order_words(order: fleet_pb2.InstanceOrder | fleet_pb2.InstanceStatus) -> str:
    """What is ordered for an instance, for people: "cordoned: a new disk, weight 0.1: canary"; empty without an order."""
    return ", ".join(
        filter(None, (_with_reason("cordoned", order.cordon_reason) if order.cordoned else "", weight_words(order)))
    )


def weight_words(order: fleet_pb2.InstanceOrder | fleet_pb2.InstanceStatus) -> str:
    """The weight that is ordered, for people: "weight 0.1: canary"; empty without one."""
    # A router that does not know of weights tells none.
    if not order.HasField("weight") or order.weight == 1:
        return ""
    return _with_reason(f"weight {order.weight:g}", order.weight_reason)


def _with_reason(ordered: str, reason: str) -> str:
    return f"{ordered}: {reason}" if reason else ordered


def state_words(status: fleet_pb2.InstanceStatus) -> str:
    """An instance's state, and behind that of a cordon or drain what it is besides: "CORDONED, UNHEALTHY"; never READY there."""
    shown = [status.state]
    if status.underlying_state not in (
        status.state,
        fleet_pb2.INSTANCE_STATE_READY,
        fleet_pb2.INSTANCE_STATE_UNSPECIFIED,
    ):
        shown.append(status.underlying_state)
    return ", ".join(fleet_pb2.InstanceState.Name(state).removeprefix("INSTANCE_STATE_") for state in shown)


def orders_of(router: str) -> list[fleet_pb2.InstanceOrder]:
    """All orders by instance id. Raises grpc.RpcError; none at a router that has no orders yet."""
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
    else:
        typer.echo(f"{instance_id}: no agent reports it ({ordered or 'nothing is ordered for it'})")
    _say_if_alone(answer.this_replica_only)


def _now(status: fleet_pb2.InstanceStatus) -> str:
    return f"{status.instance.instance_id} is {state_words(status)}, {status.num_requests} requests open"


def _say_if_alone(this_replica_only: bool) -> None:
    if this_replica_only:
        typer.echo("the router's Redis is away, so other routers follow when it is back", err=True)
