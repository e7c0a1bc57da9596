"""Which blocks are checked, and what follows from a difference."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_connector.layerwise.kv_checks import CheckSettings, RefusedSenders, differing


@given(st.integers(1, 10_000), st.integers(1, 8), st.booleans(), st.integers())
def test_checked_blocks_are_the_last_fixed_one_and_others_before_it(
    total: int, blocks: int, last_is_fixed: bool, seed: int
) -> None:
    places = CheckSettings(1.0, blocks).positions(total, random.Random(seed), last_is_fixed=last_is_fixed)
    if total == 1 and not last_is_fixed:
        assert places == ()
        return
    assert places[0] == (1 if last_is_fixed else 2), "a receiver has a prefix in its cache, it lacks the last blocks"
    assert len(places) <= blocks
    assert list(places) == sorted(set(places))
    assert places[-1] <= total


def test_a_share_of_the_transfers_is_checked() -> None:
    rng = random.Random(1)
    checked = sum(bool(CheckSettings(0.25, 2).positions(100, rng, last_is_fixed=True)) for _ in range(4_000))
    assert 900 < checked < 1_100
    assert not any(CheckSettings(0.0, 2).positions(100, rng, last_is_fixed=True) for _ in range(100))
    assert CheckSettings(1.0, 2).positions(0, rng, last_is_fixed=True) == ()


def test_settings_come_from_the_engine() -> None:
    assert CheckSettings.of({}) == CheckSettings(1.0, 4)
    assert CheckSettings.of({"checked_share": "0.1", "checked_blocks": 2}) == CheckSettings(0.1, 2)
    for wrong in ({"checked_share": 1.5}, {"checked_share": -1}, {"checked_blocks": 0}):
        with pytest.raises(ValueError, match="checked_"):
            CheckSettings.of(wrong)


def test_a_difference_names_the_blocks() -> None:
    assert differing([(1, 7), (4, -8), (9, 3)], [7, -8, 3]) == []
    assert differing([(1, 7), (4, -8), (9, 3)], [7, 8, 4]) == [4, 9]


def test_a_sender_is_refused_once_and_for_its_life() -> None:
    refused = RefusedSenders()
    assert "e1" not in refused
    assert refused.refuse("e1")
    assert not refused.refuse("e1")
    assert "e1" in refused
    assert "e1-restarted" not in refused
