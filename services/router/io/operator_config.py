"""What operators have told the fleet, as the shared store keeps it for all replicas: one JSON text."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from pointsman.router.core.instances.instance_orders import InstanceOrder, OrderChange, changed_orders

# An instance that went for good stays on the list of those that drain; of too many the oldest go.
MAX_DRAINED = 1_000


class OperatorConfig(msgspec.Struct, frozen=True):
    """The policy to place by (None: each replica's own), the instances that drain, with the incarnation that this was said of,
    and the orders by instance id, which outlast incarnations."""

    policy: tuple[str, dict[str, float | bool | str]] | None = None
    drained: dict[str, str] = {}
    orders: dict[str, InstanceOrder] = {}

    @classmethod
    def read(cls, text: str) -> OperatorConfig:
        """The configuration as the store keeps it. Raises msgspec.MsgspecError."""
        return msgspec.json.decode(text or "{}", type=cls)

    def with_drain(self, instance_id: str, incarnation: str, lasts: Callable[[str, str], bool]) -> OperatorConfig:
        """The same with the instance drained in this incarnation ("": in none), without the drains that do not last: of
        incarnations that are over."""
        drained = {one: life for one, life in self.drained.items() if one != instance_id and lasts(one, life)}
        if incarnation:
            drained[instance_id] = incarnation
        return replace(self, drained=dict(list(drained.items())[-MAX_DRAINED:]))

    def with_order(self, change: OrderChange) -> OperatorConfig:
        """The same with one instance's order changed. Raises TooManyOrders."""
        return replace(self, orders=changed_orders(self.orders, change))
