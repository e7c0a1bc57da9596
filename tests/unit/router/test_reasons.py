"""Every reason has its sentence, the same wherever a human reads it."""

from __future__ import annotations

import re

import pytest

from pointsman_lab.rival_policies.registry import POLICIES
from pointsman_router.core.placement_types import route_class
from pointsman_router.core.policy.base import NO_KV_TRANSFER
from pointsman_router.core.policy.reasons import REASONS, ROUTE_CLASSES, explained
from pointsman_router.core.requests.placement_plans import COLOCATED_AFTER_FAILURE, SERVED_ALONE
from pointsman_router.core.requests.recovered_placement import REASON as RECOVERED
from tests.support.policy_docstrings import documented_reasons
from tests.support.repository import MAKE_PAGES, REPOSITORY

# Reasons that are independent of the policy: of plans that could not be executed as planned or were made by another router, and
# of an offload's steps.
OF_ALL = {NO_KV_TRANSFER, SERVED_ALONE, COLOCATED_AFTER_FAILURE, RECOVERED, "offload"}


def test_every_reason_that_a_policy_names_has_a_sentence_and_no_other_code_has_one() -> None:
    named = set().union(*map(documented_reasons, POLICIES.values()))
    assert len(named) > 30
    unnamed = REASONS.keys() - named - OF_ALL
    assert not unnamed, f"no policy's docstring names {unnamed} in its line Reasons:"
    unexplained = (named | OF_ALL) - REASONS.keys()
    assert not unexplained, f"core/policy/reasons.py has no clause for {unexplained}"


def test_a_sentence_is_one_clause_without_codes() -> None:
    for reason, sentence in REASONS.items():
        assert sentence == sentence.strip().rstrip("."), reason
        assert len(sentence) <= 90, f"{reason}: {len(sentence)} characters of at most 90"
        assert "_" not in sentence, f"{reason}: a code in its clause"


def test_an_unknown_reason_stands_for_itself() -> None:
    assert explained("session_affinity") == "session_affinity: kept on its session's instance"
    assert explained("of_a_later_version") == "of_a_later_version"


def test_the_page_on_policies_has_the_same_sentences() -> None:
    page = (REPOSITORY / "docs/policies.md").read_text()
    table = page.partition("| reason | what it means |")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)) == REASONS, MAKE_PAGES


@pytest.mark.parametrize(
    ("new", "cached", "expected", "because"),
    [
        (14, 0, "LIGHT", "under 5,000 new tokens"),
        (4_999, 0, "LIGHT", "under 5,000 new tokens"),
        (19_999, 20_000, "LIGHT", "over 50% of the prompt cached"),
        (5_000, 5_000, "MEDIUM", "5,000 new tokens or more, and at most 50% of the prompt cached"),
        (20_000, 100_000, "HEAVY", "20,000 new tokens or more"),
    ],
)
def test_a_class_is_explained_by_its_own_bounds(new: int, cached: int, expected: str, because: str) -> None:
    assert route_class(new, new + cached) == expected
    assert because in ROUTE_CLASSES[expected]
