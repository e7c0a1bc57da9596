"""What operators order for one instance: `pointsman drain`, `cordon`, `uncordon` and `weight`."""

from __future__ import annotations

from typing import Annotated, Any

import grpc
import typer

from pointsman.cli.router_call import DEFAULT_ROUTER, call, dial, operator
from pointsman.common.io.pages import whole
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc

TIMEOUT_S = 10.0

RouterFlag = Annotated[str, typer.Option(envvar="POINTSMAN_ROUTER", help="HOST:PORT of a router")]


def drain(
    instance_id: str,
    router: RouterFlag = DEFAULT_ROUTER,
    resume: Annotated[bool, typer.Option(help="undo a drain")] = False,
) -> None:
    """Stop placing on an instance until its engine restarts (or resume), by all routers that share a Redis; tells how many
    requests it still has. `cordon` outlasts the restart."""
    request = fleet_pb2.DrainRequest(instance_id=instance_id, resume=resume)
    answer = call(router, lambda fleet: fleet.Drain, request, TIMEOUT_S)
    typer.echo(_now(answer.instance))
    _say_if_alone(answer.this_replica_only)


def cordon(
    instance_id: str,
    router: RouterFlag = DEFAULT_ROUTER,
    reason: Annotated[str, typer.Option(help="why, for others who look")] = "",
) -> None:
    """Stop placing on an instance until `uncordon`, whatever restarts, by all routers that share a Redis. Its id need not be
    known yet. What runs there goes on to its end."""
    _order(router, instance_id, cordoned=True, reason=reason)


def uncordon(instance_id: str, router: RouterFlag = DEFAULT_ROUTER) -> None:
    """Let an instance in again after `cordon`. Its weight stays as it is."""
    _order(router, instance_id, cordoned=False, reason="")


def weight(
    instance_id: str,
    weight: Annotated[float, typer.Argument(help="0 to 1: the part of its fair share of new sessions that it gets")],
    router: RouterFlag = DEFAULT_ROUTER,
    reason: Annotated[str | None, typer.Option(help="why, for others who look")] = None,
) -> None:
    """Give an instance only a part of its fair share of new sessions (0: none, 1: all of it again), until it is given another.
    Sessions that live there stay."""
    if reason is None:
        _order(router, instance_id, weight=weight)
    else:
        _order(router, instance_id, weight=weight, reason=reason)


def order_words(cordoned: bool, weight: float, reason: str) -> str:
    """What is ordered for an instance, for people: "cordoned, weight 0.1: reason"; empty without an order."""
    ordered = ", ".join(["cordoned"] * cordoned + [f"weight {weight:g}"] * (weight < 1))
    return f"{ordered}: {reason}" if ordered and reason else ordered


def orders_of(router: str) -> list[fleet_pb2.InstanceOrder]:
    """All orders by instance id. Raises grpc.RpcError; none at a router that has no orders yet."""
    with dial(router) as channel:
        list_orders = fleet_pb2_grpc.FleetServiceStub(channel).ListInstanceOrders
        shown = operator()
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


def _order(router: str, instance_id: str, **changes: Any) -> None:
    request = fleet_pb2.SetInstanceOrderRequest(instance_id=instance_id, **changes)
    answer = call(router, lambda fleet: fleet.SetInstanceOrder, request, TIMEOUT_S)
    order = answer.order
    ordered = order_words(order.cordoned, order.weight, order.reason)
    if answer.HasField("instance"):
        typer.echo(_now(answer.instance) + (f" ({ordered})" if ordered else ""))
    else:
        typer.echo(f"{instance_id} is not known yet ({ordered or 'nothing is ordered for it'})")
    _say_if_alone(answer.this_replica_only)


def _now(status: fleet_pb2.InstanceStatus) -> str:
    state = fleet_pb2.InstanceState.Name(status.state).removeprefix("INSTANCE_STATE_")
    return f"{status.instance.instance_id} is {state}, {status.num_requests} requests open"


def _say_if_alone(this_replica_only: bool) -> None:
    if this_replica_only:
        typer.echo("the router's Redis is away, so other routers follow when it is back", err=True)
