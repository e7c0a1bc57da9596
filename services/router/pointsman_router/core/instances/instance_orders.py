"""Operators' orders for instances, by id: a cordon, or a weight for new sessions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

# Maximum number of orders in force.
MAX_ORDERS = 10_000
# Maximum number of lifted orders that are kept, so that a router that was away does not bring them back.
MAX_LIFTED = 1_000
# Maximum lengths, characters.
MAX_INSTANCE_ID, MAX_REASON = 256, 300


class InstanceOrder(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An operator's order for one instance. If two routers have different orders, the later change is in force. So a lifted order
    is kept for a while, without effect."""

    cordoned: bool = False  # nothing new goes to the instance
    weight: float = 1.0  # the part of its fair share of new sessions that it gets, 0 to 1
    cordon_reason: str = ""  # the operator's
    weight_reason: str = ""  # the operator's
    cordon_set_at: float = 0.0  # time of the last change, s since 1970
    weight_set_at: float = 0.0  # time of the last change, s since 1970

    @property
    def in_force(self) -> bool:
        """Whether the order has an effect."""
        return self.cordoned or self.weight < 1.0

    @property
    def set_at(self) -> float:
        """When the order was last changed, s since 1970."""
        return max(self.cordon_set_at, self.weight_set_at)


NO_ORDER = InstanceOrder()


class OrderChange(msgspec.Struct, frozen=True, gc=False):
    """A change of one instance's order. Fields that are None stay unchanged."""

    instance_id: str  # of an instance that need not be known
    set_at: float  # s since 1970
    cordoned: bool | None = None  # as in InstanceOrder
    weight: float | None = None  # as in InstanceOrder
    reason: str | None = None  # of the cordon, the weight or both that are set here; it is removed with them


class InvalidOrder(ValueError):
    """A change is invalid; `field` names the invalid field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class TooManyOrders(Exception):
    """MAX_ORDERS orders are in force already."""


def check_change(change: OrderChange) -> None:
    """Raise InvalidOrder if a change is invalid."""
    if not change.instance_id:
        raise InvalidOrder("instance_id", "must not be empty")
    if len(change.instance_id) > MAX_INSTANCE_ID:
        raise InvalidOrder("instance_id", f"at most {MAX_INSTANCE_ID} characters")
    if change.cordoned is None and change.weight is None:
        raise InvalidOrder("cordoned", "cordoned or weight is needed")
    # Written so that NaN is invalid, too.
    if change.weight is not None and not 0.0 <= change.weight <= 1.0:
        raise InvalidOrder("weight", "must be 0 to 1")
    if len(change.reason or "") > MAX_REASON:
        raise InvalidOrder("reason", f"at most {MAX_REASON} characters")


def later(now: float, before: float) -> float:
    """Return the time to record for a change that replaces one of `before`, in s since 1970: `now`, or just after `before` if
    that is later, since the clock of the router that set `before` may be ahead."""
    return max(now, math.nextafter(before, math.inf))


def changed_orders(orders: Mapping[str, InstanceOrder], change: OrderChange) -> dict[str, InstanceOrder]:
    """Return the orders after a change that check_change() accepts. Raises TooManyOrders if MAX_ORDERS are in force already."""
    before = after = orders.get(change.instance_id, NO_ORDER)
    if change.cordoned is not None:
        reason = before.cordon_reason if change.reason is None else change.reason
        after = replace(
            after,
            cordoned=change.cordoned,
            cordon_reason=reason if change.cordoned else "",
            cordon_set_at=later(change.set_at, before.cordon_set_at),
        )
    if change.weight is not None:
        reason = before.weight_reason if change.reason is None else change.reason
        after = replace(
            after,
            weight=change.weight,
            weight_reason=reason if change.weight < 1.0 else "",
            weight_set_at=later(change.set_at, before.weight_set_at),
        )
    if after.in_force and not before.in_force and sum(order.in_force for order in orders.values()) >= MAX_ORDERS:
        raise TooManyOrders
    return bounded_orders({**orders, change.instance_id: after})


def merged_orders(some: Mapping[str, InstanceOrder], others: Mapping[str, InstanceOrder]) -> dict[str, InstanceOrder]:
    """Return for each instance the cordon and the weight that were set last, each by its own time. The merge is commutative and
    idempotent. The result may have more than MAX_ORDERS orders, since no order that was confirmed to an operator is dropped."""
    merged = dict(some)
    for name, order in others.items():
        if (known := merged.get(name)) is None:
            merged[name] = order
        elif known != order:
            merged[name] = _merged(known, order)
    return bounded_orders(merged)


def bounded_orders(orders: dict[str, InstanceOrder]) -> dict[str, InstanceOrder]:
    """Return all orders in force, and the MAX_LIFTED lifted ones that were changed last. Mutates `orders`."""
    lifted = [name for name, order in orders.items() if not order.in_force]
    if len(lifted) > MAX_LIFTED:
        lifted.sort(key=lambda name: (orders[name].set_at, name))
        for name in lifted[:-MAX_LIFTED]:
            del orders[name]
    return orders


def _merged(one: InstanceOrder, other: InstanceOrder) -> InstanceOrder:
    # If both were set at the same time, the values decide, so that all routers have the same result.
    cordon = max(one, other, key=lambda order: (order.cordon_set_at, order.cordoned, order.cordon_reason))
    weight = max(one, other, key=lambda order: (order.weight_set_at, -order.weight, order.weight_reason))
    return InstanceOrder(
        cordon.cordoned,
        weight.weight,
        cordon.cordon_reason,
        weight.weight_reason,
        cordon.cordon_set_at,
        weight.weight_set_at,
    )
