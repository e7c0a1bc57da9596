"""The index of host memory and storage, against a model that looks at each instance and key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_common.core.key_report_types import Tier
from pointsman_router.core.prefix import lower_tiers
from pointsman_router.core.prefix.exact_index import IndexFull
from pointsman_router.core.prefix.lower_tiers import MOST_CONTINUED, LowerBlocks, LowerTiers
from tests.support.interpreter_steps import Steps

KEYS = list(range(1_000, 1_040))
NAMES = [f"i{number}" for number in range(6)]
# For each instance: blocks on the GPU, then how far its runs reach in host memory and in storage, and how many blocks at their
# front were evicted there.
RUNS = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 10), st.integers(0, 10))


def naive(
    starts: Mapping[str, int], held: Mapping[Tier, Mapping[str, set[int]]], store: Sequence[str] = ()
) -> dict[str, LowerBlocks]:
    """Key by key, for each instance alone."""
    found = {}
    for name, start in starts.items():
        storage = set(held[Tier.STORAGE].get(name, set()))
        if name in store:
            storage = set().union(*(held[Tier.STORAGE].get(owner, set()) for owner in store))
        end = start
        while end < len(KEYS) and KEYS[end] in held[Tier.HOST].get(name, set()):
            end += 1
        last = end
        while last < len(KEYS) and KEYS[last] in storage:
            last += 1
        if last > start:
            found[name] = LowerBlocks(end - start, last - end)
    return found


@given(
    runs=st.dictionaries(st.sampled_from(NAMES), RUNS),
    store=st.lists(st.sampled_from(NAMES), unique=True),
    gone=st.sets(st.sampled_from(NAMES), max_size=2),
)
def test_runs_continue_as_key_by_key(
    runs: dict[str, tuple[int, int, int, int, int]], store: list[str], gone: set[str]
) -> None:
    tiers = LowerTiers()
    held: dict[Tier, dict[str, set[int]]] = {Tier.HOST: {}, Tier.STORAGE: {}}
    for name in store:
        tiers.share(name, "m", "s")
    for name, (start, host, storage, host_evicted, storage_evicted) in runs.items():
        # What a lower tier has evicted at its front is on the GPU, or the run does not begin: keys are chained from the start on.
        for tier, reach, evicted in ((Tier.HOST, host, host_evicted), (Tier.STORAGE, storage, storage_evicted)):
            keys = KEYS[min(evicted, start) : reach]
            tiers.add(tier, name, keys)
            held[tier][name] = set(keys)
    for name in gone:
        tiers.drop(name)
        for tier in held:
            held[tier].pop(name, None)
    tiers.sweep()
    tiers.check_invariants()
    starts = {name: run[0] for name, run in runs.items()}
    used = [name for name in store if name in starts]
    if len({run[2] for run in runs.values()}) > 1 and used:
        # The members' parts of a shared store must be chained together, as the store's blocks are.
        reach = max(len(held[Tier.STORAGE].get(name, ())) for name in store)
        for name in store:
            tiers.remove(Tier.STORAGE, name, list(held[Tier.STORAGE].get(name, ())))
            held[Tier.STORAGE][name] = set()
        tiers.add(Tier.STORAGE, store[0], KEYS[:reach])
        held[Tier.STORAGE][store[0]] = set(KEYS[:reach])
    assert tiers.continued(KEYS, starts) == naive(starts, held, store)


@given(ends=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=60))
def test_only_the_longest_of_many_are_searched(ends: list[tuple[int, int]]) -> None:
    tiers = LowerTiers()
    starts = {f"i{number}": start for number, (start, _) in enumerate(ends)}
    held: dict[Tier, dict[str, set[int]]] = {Tier.HOST: {}, Tier.STORAGE: {}}
    for number, (_, end) in enumerate(ends):
        tiers.add(Tier.HOST, f"i{number}", KEYS[:end])
        held[Tier.HOST][f"i{number}"] = set(KEYS[:end])
    every = naive(starts, held)
    longest = sorted({starts[name] + blocks.host for name, blocks in every.items()}, reverse=True)[:MOST_CONTINUED]
    expected = {name: blocks for name, blocks in every.items() if starts[name] + blocks.host in longest}
    assert tiers.continued(KEYS, starts) == expected


def test_a_pool_without_lower_tiers_has_no_index() -> None:
    tiers = LowerTiers()
    assert not tiers
    assert tiers.indexes() == ()
    assert tiers.continued(KEYS, {"a": 3}) == {}
    tiers.add(Tier.HOST, "a", KEYS)
    assert tiers
    tiers.remove(Tier.HOST, "a", KEYS)
    assert not tiers


def test_keys_that_do_not_fit_are_refused() -> None:
    tiers = LowerTiers(max_keys=10)
    tiers.add(Tier.HOST, "a", KEYS[:8])
    with pytest.raises(IndexFull):
        tiers.add(Tier.HOST, "b", KEYS[8:12])
    tiers.add(Tier.STORAGE, "b", KEYS[8:12])
    tiers.add(Tier.HOST, "b", KEYS[:8])
    assert (tiers.count("a", Tier.HOST), tiers.count("b", Tier.STORAGE)) == (8, 4)


def test_a_store_is_shared_within_its_pool_only() -> None:
    tiers = LowerTiers()
    for name, pool in (("a", "m"), ("b", "m"), ("c", "n")):
        tiers.share(name, pool, "s")
    tiers.add(Tier.STORAGE, "a", KEYS[:8])
    starts = dict.fromkeys("abcd", 2)
    assert tiers.continued(KEYS, starts) == {"a": LowerBlocks(0, 6), "b": LowerBlocks(0, 6)}
    tiers.share("b", "m", "")
    assert tiers.continued(KEYS, starts) == {"a": LowerBlocks(0, 6)}
    tiers.share("b", "m", "s")
    tiers.drop("b")
    assert tiers.continued(KEYS, starts) == {"a": LowerBlocks(0, 6), "b": LowerBlocks(0, 6)}
    tiers.drop("a")
    assert tiers.continued(KEYS, starts) == {}
    tiers.check_invariants()


def test_a_restart_costs_the_same_however_many_share_a_store() -> None:
    steps = []
    for size in (20, 500):
        tiers = LowerTiers()
        for number in range(size):
            tiers.share(f"i{number}", "m", "s")
        tiers.add(Tier.STORAGE, "i1", KEYS[:8])
        some = {"i6": 2, "i7": 2}
        expected = dict.fromkeys(some, LowerBlocks(0, 6))
        assert tiers.continued(KEYS, some) == expected
        with Steps() as taken:
            tiers.drop("i7")
            assert tiers.continued(KEYS, some) == expected
        steps.append(taken.count)
    assert steps[0] == steps[1]


def test_a_decision_probes_few_keys_for_many_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, tiers, probes = list(range(8_125)), LowerTiers(), 0
    for number in range(64):
        tiers.add(Tier.HOST, f"i{number}", keys[: 4_000 + 60 * number])

    class Counted(list[int]):
        def __getitem__(self, at: Any) -> Any:
            nonlocal probes
            probes += 1
            return super().__getitem__(at)

    found = tiers.continued(Counted(keys), {f"i{number}": 1_000 + number for number in range(64)})
    assert len(found) == MOST_CONTINUED
    # A look-up at the start of each, and a bisection of the longest ones.
    assert probes < 64 + 14 * MOST_CONTINUED
    assert lower_tiers.MOST_CONTINUED == MOST_CONTINUED
