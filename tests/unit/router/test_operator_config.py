"""What operators have ordered, changed at several replicas apart from each other and merged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pointsman_router.core.instances.instance_orders import MAX_LIFTED, OrderChange
from pointsman_router.io.operator_config import MAX_DRAINS, OperatorConfig, contradictions
from pointsman_router.io.router import ReplicaInfo, merged_operator_configs

IDS = st.sampled_from(["a", "b", "c"])
TIMES = st.floats(1.0, 20.0)
CHANGES = st.one_of(
    st.builds(OrderChange, IDS, TIMES, st.booleans(), st.none(), st.sampled_from([None, "why"])),
    st.builds(OrderChange, IDS, TIMES, st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([None, "why"])),
    st.tuples(st.just("drain"), IDS, st.sampled_from(["", "1", "2"]), TIMES),
    st.tuples(st.just("policy"), st.sampled_from(["unified", "sticky"]), TIMES),
)


def changed(config: OperatorConfig, change: Any) -> OperatorConfig:
    match change:
        case OrderChange():
            return config.with_order(change)
        case ("drain", instance_id, incarnation, now):
            return config.with_drain(instance_id, incarnation, now)
        case ("policy", name, now):
            return config.with_policy((name, {}), now)
    raise AssertionError(change)


NONE = OperatorConfig()


def made(*changes: object, since: OperatorConfig = NONE) -> OperatorConfig:
    for change in changes:
        since = changed(since, change)
    return since


@given(st.lists(CHANGES), st.lists(CHANGES), st.lists(CHANGES))
def test_the_order_of_merging_does_not_matter(one: list[object], other: list[object], third: list[object]) -> None:
    a, b, c = made(*one), made(*other), made(*third)
    assert a.merged(b) == b.merged(a)
    assert a.merged(b).merged(c) == a.merged(b.merged(c))
    assert a.merged(a) == a
    assert a.merged(b).merged(b) == a.merged(b)
    assert OperatorConfig.read(a.written()) == a


@given(st.lists(CHANGES, max_size=4), st.lists(st.tuples(st.integers(0, 2), CHANGES), max_size=12), st.data())
def test_nothing_is_lost_however_replicas_and_the_store_meet(
    first: list[object], apart: list[tuple[int, object]], data: st.DataObject
) -> None:
    """Three replicas start with the same config and change it independently. The store has the old config or none, and they write
    to it in any order. In the end all have the last change of each part."""
    before = made(*first)
    replicas = [before] * 3
    for who, change in apart:
        replicas[who] = changed(replicas[who], change)
    latest: dict[tuple[str, str], tuple[float, object]] = {}
    for config in (before, *replicas):
        for part in config.changes(OperatorConfig()):
            key = part.instance_id, part.kind
            latest[key] = max(latest.get(key, (0.0, "")), (part.set_at, str(part.now)))
    store = data.draw(st.sampled_from([before.written(), ""]))
    texts = [config.written() for config in replicas]
    for who in data.draw(st.permutations([0, 0, 1, 1, 2, 2])):
        texts[who] = store = merged_operator_configs(before.written(), texts[who], store)
    texts = [merged_operator_configs(before.written(), text, store) for text in texts]
    assert texts == [store] * 3, "no replica has anything to write any more"
    found = {
        (part.instance_id, part.kind): part.set_at for part in OperatorConfig.read(store).changes(OperatorConfig())
    }
    assert found == {key: set_at for key, (set_at, _) in latest.items()}


def test_of_two_that_contradict_each_other_the_later_counts_and_the_other_is_logged() -> None:
    before = made(OrderChange("a", 1.0, cordoned=True, reason="a new disk"), OrderChange("b", 1.0, cordoned=True))
    one = made(OrderChange("a", 3.0, cordoned=False), OrderChange("b", 3.0, weight=0.5), since=before)
    other = made(OrderChange("a", 2.0, cordoned=True, reason="smells"), OrderChange("b", 4.0, weight=0.5), since=before)
    for ours, theirs in ((one, other), (other, one)):
        with capture_logs() as logged:
            merged = OperatorConfig.read(merged_operator_configs(before.written(), ours.written(), theirs.written()))
        assert not merged.orders["a"].cordoned
        [line] = logged
        assert (line["log_level"], line["instance"], line["kind"]) == ("warning", "a", "cordon")
        assert (line["counts"], line["set_aside"], line["set_aside_reason"]) == (False, True, "smells")
    assert contradictions(before, before, other) == [], "what only one has changed"


def test_what_was_lifted_does_not_come_back_from_a_replica_that_was_away() -> None:
    away = made(OrderChange("a", 1.0, cordoned=True), ("drain", "b", "1", 1.0))
    lifted = made(OrderChange("a", 2.0, cordoned=False), ("drain", "b", "", 2.0), since=away)
    merged = away.merged(lifted)
    assert (merged.orders_in_force, merged.drained) == ({}, {})


def test_the_store_s_counts_where_one_cannot_be_read() -> None:
    own = made(OrderChange("a", 1.0, cordoned=True)).written()
    for newer in ('{"policy":{"name":"of a later version"}}', '{"of_a_later_version":' + "[" * 5_000):
        assert merged_operator_configs("", own, newer) == newer
        assert merged_operator_configs(newer, newer, own) == own
    later = own[:-1] + ',"of_a_later_version":1}'
    assert merged_operator_configs(own, own, later) == later, "the store has all of it, so nothing is written"


@pytest.mark.parametrize("beyond", [0, 5])
def test_what_is_over_is_bounded(beyond: int) -> None:
    config = OperatorConfig()
    for number in range(MAX_DRAINS + beyond):
        config = config.with_drain(f"i{number}", "1", number)
    assert len(config.drained) == MAX_DRAINS
    assert f"i{MAX_DRAINS + beyond - 1}" in config.drained
    for number in range(MAX_LIFTED + beyond):
        config = config.with_order(OrderChange(f"i{number}", number, cordoned=False))
    assert len(config.merged(config).orders) == MAX_LIFTED


def test_drains_that_were_undone_keep_no_drain_from_its_instance() -> None:
    config = OperatorConfig().with_drain("bad", "1", 0)
    for number in range(MAX_DRAINS):
        config = config.with_drain(f"i{number}", "1", 2 * number + 1).with_drain(f"i{number}", "", 2 * number + 2)
    assert config.drained["bad"] == "1"


def test_a_report_of_another_replica_that_is_nested_too_deep_is_empty() -> None:
    assert ReplicaInfo.read('{"of_a_later_version":' + "[" * 5_000) == ReplicaInfo()
