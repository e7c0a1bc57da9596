"""Which pool a name means: to gateways as to routers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.pool_state import names_of
from pointsman_router.core.instances.instance_registry import InstanceRegistry
from pointsman_router.core.prefix.exact_index import PrefixIndex
from tests.support.router_values import info

NAMES = st.lists(st.sampled_from("mnopq"), max_size=3, unique=True).map(tuple)


@given(st.lists(st.tuples(st.sampled_from("mno"), NAMES, NAMES), min_size=1, max_size=5))
def test_a_name_means_the_same_pool_to_gateways_and_routers(instances: list[tuple[str, str, str]]) -> None:
    registry = InstanceRegistry(PrefixIndex())
    for number, (model, served, adapters) in enumerate(instances):
        registry.add(info(f"i{number}", model=model, served_names=served, lora_names=adapters), number, 0.0)
    pool_messages = [
        placement_pb2.Pool(model=pool.model, served_names=pool.served_names, lora_names=pool.lora_names)
        for pool in registry.pools()
    ]
    for order in (pool_messages, pool_messages[::-1]):
        names = names_of(order)
        assert {name: pool for name, (pool, _) in names.items()} == {
            name: registry.pool_of(name) for name in "mnopq" if registry.pool_of(name)
        }
        pools = {pool.model: pool for pool in pool_messages}
        for name, (pool, adapter) in names.items():
            assert adapter in ("", name)
            assert not adapter or (name != pool and name not in pools[pool].served_names)
