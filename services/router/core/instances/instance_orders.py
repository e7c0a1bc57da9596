"""What operators order for an instance by its id: nothing new at all, or only a share of the new sessions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

MAX_ORDERS = 10_000
# Orders that were lifted and are remembered, so that no router that was away brings them back.
MAX_LIFTED = 1_000
# In characters.
MAX_INSTANCE_ID, MAX_REASON = 256, 300


class InstanceOrder(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`cordoned`: nothing new goes to the instance. `weight` (0 to 1): which part of its fair share of new sessions it gets. Each
    has the operator's reason, and when it was last changed, in s since 1970: of two routers' orders the later one counts. That is
    why an order that is lifted stays for a while, without effect."""

    cordoned: bool = False
    weight: float = 1.0
    cordon_reason: str = ""
    weight_reason: str = ""
    cordon_set_at: float = 0.0
    weight_set_at: float = 0.0

    @property
    def in_force(self) -> bool:
        """Whether it is other than no order."""
        return self.cordoned or self.weight < 1.0

    @property
    def set_at(self) -> float:
        """When it was last changed."""
        return max(self.cordon_set_at, self.weight_set_at)


NO_ORDER = InstanceOrder()


class OrderChange(msgspec.Struct, frozen=True, gc=False):
    """A change of one instance's order at `set_at` (s since 1970). What is None stays as it is. `reason` is that of what is set
    here, a cordon, a weight or both; it ends with them."""

    instance_id: str
    set_at: float
    cordoned: bool | None = None
    weight: float | None = None
    reason: str | None = None


class InvalidOrder(ValueError):
    """A change that no order can have; `field` names what is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class TooManyOrders(Exception):
    """There are MAX_ORDERS already."""


def check_change(change: OrderChange) -> None:
    """Raise InvalidOrder for a change that no order can have."""
    if not change.instance_id:
        raise InvalidOrder("instance_id", "must not be empty")
    if len(change.instance_id) > MAX_INSTANCE_ID:
        raise InvalidOrder("instance_id", f"at most {MAX_INSTANCE_ID} characters")
    if change.cordoned is None and change.weight is None:
        raise InvalidOrder("cordoned", "cordoned or weight is needed")
    # Written so that it is also true of NaN.
    if change.weight is not None and not 0.0 <= change.weight <= 1.0:
        raise InvalidOrder("weight", "must be 0 to 1")
    if len(change.reason or "") > MAX_REASON:
        raise InvalidOrder("reason", f"at most {MAX_REASON} characters")


def later(now: float, before: float) -> float:
    """When a change is made that replaces one of `before`, in s since 1970: later than that, also where another router's clock,
    which gave `before`, is ahead."""
    return max(now, math.nextafter(before, math.inf))


def changed_orders(orders: Mapping[str, InstanceOrder], change: OrderChange) -> dict[str, InstanceOrder]:
    """The orders after a change that check_change() lets pass. Raises TooManyOrders."""
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
    if after.in_force and not before.in_force and sum(one.in_force for one in orders.values()) >= MAX_ORDERS:
        raise TooManyOrders
    return bounded_orders({**orders, change.instance_id: after})


def merged_orders(some: Mapping[str, InstanceOrder], others: Mapping[str, InstanceOrder]) -> dict[str, InstanceOrder]:
    """Of each instance the cordon and the weight that were set last, each for itself. The same whichever comes first, and however
    often. There may be more than MAX_ORDERS of them: none that an operator was promised is left out."""
    merged = dict(some)
    for name, order in others.items():
        if (known := merged.get(name)) is None:
            merged[name] = order
        elif known != order:
            merged[name] = _merged(known, order)
    return bounded_orders(merged)


def bounded_orders(orders: dict[str, InstanceOrder]) -> dict[str, InstanceOrder]:
    """All that are in force, and of the others the MAX_LIFTED that were changed last."""
    lifted = [name for name, order in orders.items() if not order.in_force]
    if len(lifted) > MAX_LIFTED:
        lifted.sort(key=lambda name: (orders[name].set_at, name))
        for name in lifted[:-MAX_LIFTED]:
            del orders[name]
    return orders


def _merged(one: InstanceOrder, other: InstanceOrder) -> InstanceOrder:
    # Where two were set at once the values decide, so that all routers find the same.
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
