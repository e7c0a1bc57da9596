"""The operator config: what operators have set for all replicas, one JSON text in the shared store.

While the store does not answer, each replica changes its own copy; the copies are merged afterwards. Each part (the policy, an
instance's drain, its cordon, its weight) has the time when it was set, and the latest one wins. So no order is lost, whichever
replica received it, even if the store loses its data. A part that is undone stays in the config with its time, so that it wins
over an older copy of what it undid. The number of such parts is limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from pointsman_router.core.instances.instance_orders import (
    NO_ORDER,
    InstanceOrder,
    OrderChange,
    changed_orders,
    later,
    merged_orders,
)
from pointsman_router.io.store.stored_json import decoded

# Maximum number of drains in the config; beyond that the oldest are removed. The drain of an instance that never returns stays.
MAX_DRAINS = 1_000

# A policy's name and its settings.
NamedPolicy: TypeAlias = tuple[str, dict[str, float | bool | str]]


class Drain(msgspec.Struct, frozen=True, gc=False, order=True):
    """The last drain of an instance: when it was set or undone (unix s), the drained incarnation ("" if undone), and whether its
    requests are to leave it."""

    set_at: float
    incarnation: str
    move: bool = False


class Change(NamedTuple):
    """A change of one part of the operator config."""

    instance_id: str  # empty for the policy
    kind: str  # of the part
    now: object  # the part's values
    before: object  # its values until then
    reason: str  # the operator's
    set_at: float  # when the part was set, unix s


class OperatorConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The policy (None: each replica uses its own), and the drains and orders by instance id. A drain ends with the incarnation;
    an order outlasts it."""

    policy: NamedPolicy | None = None
    policy_set_at: float = 0.0
    drains: dict[str, Drain] = {}
    orders: dict[str, InstanceOrder] = {}

    @classmethod
    def read(cls, text: str) -> OperatorConfig:
        """Parse the stored text ("" for an empty config). Raises msgspec.MsgspecError if it cannot be read."""
        return decoded(text or "{}", cls)

    def written(self) -> str:
        """Return the text for the store."""
        return msgspec.json.encode(self).decode()

    @property
    def drained(self) -> dict[str, str]:
        """The drained incarnations by instance id, without drains that were undone."""
        return {name: drain.incarnation for name, drain in self.drains.items() if drain.incarnation}

    @property
    def moving(self) -> frozenset[str]:
        """The drained instances whose requests are to leave them."""
        return frozenset(name for name, drain in self.drains.items() if drain.incarnation and drain.move)

    @property
    def orders_in_force(self) -> dict[str, InstanceOrder]:
        """The orders that have an effect, by instance id: without orders that were lifted."""
        return {name: order for name, order in self.orders.items() if order.in_force}

    def with_policy(self, policy: NamedPolicy, now: float) -> OperatorConfig:
        """Return a copy with this policy, set at `now`, unix s."""
        return replace(self, policy=policy, policy_set_at=later(now, self.policy_set_at))

    def with_drain(self, instance_id: str, incarnation: str, now: float, *, move: bool = False) -> OperatorConfig:
        """Return a copy with this incarnation of the instance drained at `now`, unix s; "" undoes the instance's drain. `move`:
        its requests are to leave it."""
        before = self.drains.get(instance_id)
        drain = Drain(later(now, before.set_at if before else 0.0), incarnation, move)
        return replace(self, drains=_bounded({**self.drains, instance_id: drain}))

    def with_order(self, change: OrderChange) -> OperatorConfig:
        """Return a copy with one instance's order changed. Raises TooManyOrders."""
        return replace(self, orders=changed_orders(self.orders, change))

    def merged(self, other: OperatorConfig) -> OperatorConfig:
        """Return a config with the latest version of each part of both. Commutative and idempotent."""
        policy = max(self, other, key=_policy_order)
        drains = dict(self.drains)
        for name, drain in other.drains.items():
            drains[name] = max(drain, drains.get(name, drain))
        return OperatorConfig(
            policy.policy, policy.policy_set_at, _bounded(drains), merged_orders(self.orders, other.orders)
        )

    def changes(self, before: OperatorConfig) -> Iterator[Change]:
        """Yield the parts that were set in this config and differ from `before`."""
        if self.policy_set_at != before.policy_set_at:
            yield Change("", "policy", self.policy, before.policy, "", self.policy_set_at)
        for name, drain in self.drains.items():
            was = before.drains.get(name)
            if drain != was:
                yield Change(name, "drain", _drain_words(drain), _drain_words(was), "", drain.set_at)
        for name, order in self.orders.items():
            old = before.orders.get(name, NO_ORDER)
            if order.cordon_set_at != old.cordon_set_at:
                yield Change(name, "cordon", order.cordoned, old.cordoned, order.cordon_reason, order.cordon_set_at)
            if order.weight_set_at != old.weight_set_at:
                yield Change(name, "weight", order.weight, old.weight, order.weight_reason, order.weight_set_at)


def contradictions(before: OperatorConfig, one: OperatorConfig, other: OperatorConfig) -> list[tuple[Change, Change]]:
    """Return the conflicts between two configs that were changed independently since `before`: pairs of the change that wins,
    which is the later one, and the other change."""
    made = {(change.instance_id, change.kind): change for change in one.changes(before)}
    return [
        (change, against) if change.set_at > against.set_at else (against, change)
        for change in other.changes(before)
        if (against := made.get((change.instance_id, change.kind))) is not None and against.now != change.now
    ]


def _drain_words(drain: Drain | None) -> str:
    if drain is None:
        return ""
    return f"{drain.incarnation}, moving" if drain.move else drain.incarnation


def _bounded(drains: dict[str, Drain]) -> dict[str, Drain]:
    if len(drains) <= MAX_DRAINS:
        return drains
    # Those that were undone go first.
    order = sorted(drains.items(), key=lambda item: (bool(item[1].incarnation), item[1], item[0]))
    return dict(order[-MAX_DRAINS:])


def _policy_order(config: OperatorConfig) -> tuple[float, bool, bytes]:
    return config.policy_set_at, config.policy is not None, msgspec.json.encode(config.policy, order="sorted")
