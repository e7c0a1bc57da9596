"""What operators have told the fleet, as the shared store keeps it for all replicas: one JSON text.

Replicas change it apart while the store is away, and merge afterwards: each part of it (the policy, an instance's drain, its
cordon, its weight) has the time when it was set, and the latest counts. So no order is lost, whichever replica was asked, also
where the store comes back without its data. What is undone stays with its time, as far as the bounds go, to win over what it
undid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from pointsman.router.core.instances.instance_orders import (
    NO_ORDER,
    InstanceOrder,
    OrderChange,
    changed_orders,
    later,
    merged_orders,
)

# An instance that went for good stays on the list of those that drain; of too many the oldest go.
MAX_DRAINS = 1_000

# A policy's name and its settings.
NamedPolicy: TypeAlias = tuple[str, dict[str, float | bool | str]]


class Drain(msgspec.Struct, frozen=True, gc=False, order=True):
    """When an instance was drained last, in s since 1970, and in which incarnation; "" when that was undone."""

    set_at: float
    incarnation: str


class Change(NamedTuple):
    """One part of what operators have told, as it is after a change: of which instance ("": of the fleet), what it is now and was
    before, why, and when it was set, in s since 1970."""

    instance_id: str
    kind: str
    now: object
    before: object
    reason: str
    set_at: float


class OperatorConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The policy to place by (None: each replica's own), and by instance id drains and orders. Drains are of an incarnation,
    orders outlast it."""

    policy: NamedPolicy | None = None
    policy_set_at: float = 0.0
    drains: dict[str, Drain] = {}
    orders: dict[str, InstanceOrder] = {}

    @classmethod
    def read(cls, text: str) -> OperatorConfig:
        """The configuration as the store keeps it. Raises msgspec.MsgspecError."""
        return msgspec.json.decode(text or "{}", type=cls)

    def written(self) -> str:
        """As the store keeps it."""
        return msgspec.json.encode(self).decode()

    @property
    def drained(self) -> dict[str, str]:
        """The incarnations that drain, by instance id."""
        return {name: drain.incarnation for name, drain in self.drains.items() if drain.incarnation}

    @property
    def orders_in_force(self) -> dict[str, InstanceOrder]:
        """The orders that are other than none, by instance id."""
        return {name: order for name, order in self.orders.items() if order.in_force}

    def with_policy(self, policy: NamedPolicy, now: float) -> OperatorConfig:
        """The same with this policy set at `now`, in s since 1970."""
        return replace(self, policy=policy, policy_set_at=later(now, self.policy_set_at))

    def with_drain(self, instance_id: str, incarnation: str, now: float) -> OperatorConfig:
        """The same with the instance drained in this incarnation ("": in none) at `now`, in s since 1970."""
        before = self.drains.get(instance_id)
        drain = Drain(later(now, before.set_at if before else 0.0), incarnation)
        return replace(self, drains=_bounded({**self.drains, instance_id: drain}))

    def with_order(self, change: OrderChange) -> OperatorConfig:
        """The same with one instance's order changed. Raises TooManyOrders."""
        return replace(self, orders=changed_orders(self.orders, change))

    def merged(self, other: OperatorConfig) -> OperatorConfig:
        """Of each part what was set last in either. The same whichever comes first, and however often."""
        policy = max(self, other, key=_policy_order)
        drains = dict(self.drains)
        for name, drain in other.drains.items():
            drains[name] = max(drain, drains.get(name, drain))
        return OperatorConfig(
            policy.policy, policy.policy_set_at, _bounded(drains), merged_orders(self.orders, other.orders)
        )

    def changes(self, before: OperatorConfig) -> Iterator[Change]:
        """What was set that `before` does not have."""
        if self.policy_set_at != before.policy_set_at:
            yield Change("", "policy", self.policy, before.policy, "", self.policy_set_at)
        for name, drain in self.drains.items():
            was = before.drains.get(name)
            if drain != was:
                yield Change(name, "drain", drain.incarnation, was.incarnation if was else "", "", drain.set_at)
        for name, order in self.orders.items():
            old = before.orders.get(name, NO_ORDER)
            if order.cordon_set_at != old.cordon_set_at:
                yield Change(name, "cordon", order.cordoned, old.cordoned, order.cordon_reason, order.cordon_set_at)
            if order.weight_set_at != old.weight_set_at:
                yield Change(name, "weight", order.weight, old.weight, order.weight_reason, order.weight_set_at)


def contradictions(before: OperatorConfig, one: OperatorConfig, other: OperatorConfig) -> list[tuple[Change, Change]]:
    """The changes since `before` that do not agree, made apart from each other: the one that counts, and the earlier one."""
    made = {(change.instance_id, change.kind): change for change in one.changes(before)}
    return [
        (change, against) if change.set_at > against.set_at else (against, change)
        for change in other.changes(before)
        if (against := made.get((change.instance_id, change.kind))) is not None and against.now != change.now
    ]


def _bounded(drains: dict[str, Drain]) -> dict[str, Drain]:
    if len(drains) <= MAX_DRAINS:
        return drains
    return dict(sorted(drains.items(), key=lambda item: (item[1], item[0]))[-MAX_DRAINS:])


def _policy_order(config: OperatorConfig) -> tuple[float, bool, bytes]:
    return config.policy_set_at, config.policy is not None, msgspec.json.encode(config.policy, order="sorted")
