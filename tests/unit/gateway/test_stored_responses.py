"""Where a stored response is, by its id: the instance, whose it is, and what is known of a response that is gone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api.errors import ApiRequestError
from pointsman_gateway.core.stored_responses import find, response_id, says_not_stored

INSTANCES = st.lists(st.text(min_size=1, max_size=20), unique=True, min_size=1, max_size=8)


def pool(*placeable: str, others: tuple[str, ...] = (), model: str = "m", incarnation: str = "1") -> placement_pb2.Pool:
    made, out = (
        [placement_pb2.InstanceRef(instance_id=name, incarnation=incarnation) for name in names]
        for names in (placeable, others)
    )
    return placement_pb2.Pool(model=model, instances=made, other_instances=out)


def refused(id_: str, tenant: str, *pools: placement_pb2.Pool, complete: bool = True) -> tuple[int, str | None]:
    with pytest.raises(ApiRequestError) as seen:
        find(id_, tenant, pools, complete=complete)
    return seen.value.status, seen.value.code


@given(INSTANCES, st.text(max_size=8), st.text(max_size=8), st.uuids(), st.data())
def test_a_response_id_says_where_it_is_and_whose(
    instances: list[str], tenant: str, other: str, uuid: Any, data: st.DataObject
) -> None:
    here = data.draw(st.sampled_from(instances))
    made = response_id(here, "1", tenant, uuid.hex)
    found = find(made, tenant, [pool(*instances)], complete=True)
    assert (found.instance.instance_id, found.pool, found.placeable) == (here, "m", True)
    left = pool(*(instance_id for instance_id in instances if instance_id != here))
    assert refused(made, tenant, left) == (404, "response_lost")
    if other != tenant:
        assert refused(made, other, pool(*instances)) == (404, "not_found")
    for wrong in ("", "resp_" + uuid.hex, made + "0", made.upper(), "../" + made):
        assert refused(wrong, tenant, pool(*instances)) == (404, "not_found")


def test_an_instance_of_another_pool_or_without_requests_is_found() -> None:
    made = response_id("b", "1", "t", "0" * 32)
    found = find(made, "t", [pool("a"), pool(others=("b",), model="n")], complete=True)
    assert (found.instance.instance_id, found.pool, found.placeable) == ("b", "n", False)
    assert (found.unavailable().status, found.unavailable().code) == (503, "response_unavailable")


def test_nothing_is_lost_before_the_fleet_is_known() -> None:
    made = response_id("b", "1", "t", "0" * 32)
    assert refused(made, "t", pool("a"), complete=False) == (503, "no_instance")
    assert refused("resp_1", "t", complete=False) == (404, "not_found")


def test_what_an_engine_lost_by_a_restart_differs_from_what_it_never_had() -> None:
    found = find(response_id("a", "1", "t", "0" * 32), "t", [pool("a")], complete=True)
    assert (found.missing("1").status, found.missing("1").code) == (404, "not_found")
    assert (found.missing("2").status, found.missing("2").code) == (404, "response_lost")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"error": {"message": "Response with id 'x' not found.", "param": "response_id", "code": 404}}, True),
        ({"error": {"message": "The model `m` does not exist.", "param": "model", "code": 404}}, False),
        ({"detail": "Not Found"}, False),
        ({"error": "no"}, False),
    ],
)
def test_an_unknown_response_is_told_from_an_unknown_model(body: dict[str, Any], says: bool) -> None:
    assert says_not_stored(json.dumps(body).encode()) is says
    assert not says_not_stored(b"<html>")
    assert not says_not_stored(b'{"error":{"param":"\xff"}}')
