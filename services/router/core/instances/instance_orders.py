"""What operators order for an instance by its id: nothing new at all, or only a share of the new sessions. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MAX_ORDERS = 10_000
# In characters.
MAX_INSTANCE_ID, MAX_REASON = 256, 300


class InstanceOrder(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`cordoned`: nothing new goes to the instance. `weight` (0 to 1): which part of its fair share of new sessions it gets.
    `reason` is the operator's text, `set_at` when the order was last changed, in s since 1970."""

    cordoned: bool = False
    weight: float = 1.0
    reason: str = ""
    set_at: float = 0.0


NO_ORDER = InstanceOrder()


class OrderChange(msgspec.Struct, frozen=True, gc=False):
    """A change of one instance's order at `set_at` (s since 1970). What is None stays as it is."""

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
    if change.cordoned is None and change.weight is None and change.reason is None:
        raise InvalidOrder("cordoned", "cordoned, weight or reason is needed")
    # Written so that it is also true of NaN.
    if change.weight is not None and not 0.0 <= change.weight <= 1.0:
        raise InvalidOrder("weight", "must be 0 to 1")
    if len(change.reason or "") > MAX_REASON:
        raise InvalidOrder("reason", f"at most {MAX_REASON} characters")


def changed_orders(orders: Mapping[str, InstanceOrder], change: OrderChange) -> dict[str, InstanceOrder]:
    """The orders after a change that check_change() lets pass. One that is as if there were none is left out, with its reason.
    Raises TooManyOrders."""
    before = orders.get(change.instance_id, NO_ORDER)
    after = InstanceOrder(
        cordoned=before.cordoned if change.cordoned is None else change.cordoned,
        weight=before.weight if change.weight is None else change.weight,
        reason=before.reason if change.reason is None else change.reason,
        set_at=change.set_at,
    )
    others = {name: order for name, order in orders.items() if name != change.instance_id}
    if not after.cordoned and after.weight == 1.0:
        return others
    if len(others) >= MAX_ORDERS:
        raise TooManyOrders
    return others | {change.instance_id: after}
