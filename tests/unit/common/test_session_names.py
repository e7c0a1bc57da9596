"""Names of sessions: one for each tenant and id, and those that earlier versions have stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_common.core.session_names import session_name, tenant_and_id

TEXTS = st.text("ab/%2F5", max_size=6)
PAIRS = st.tuples(TEXTS, TEXTS.filter(bool))


@given(st.lists(PAIRS, max_size=8))
def test_each_tenants_session_has_its_own_name_which_tells_both(pairs: list[tuple[str, str]]) -> None:
    assert len({session_name(*pair) for pair in pairs}) == len(set(pairs))
    for tenant, session_id in pairs:
        assert tenant_and_id(session_name(tenant, session_id)) == (tenant, session_id)


@pytest.mark.parametrize(
    ("tenant", "session_id", "stored"),
    [
        ("default", "s-1", "default/s-1"),
        ("team red.1-x:y", "b/c%2F/%", "team red.1-x:y/b/c%2F/%"),
        ("a", "b/c", "a/b/c"),
        ("ü", "h-0", "ü/h-0"),
        ("", "s", "/s"),
    ],
)
def test_names_without_a_slash_in_the_tenant_are_those_that_earlier_versions_stored(
    tenant: str, session_id: str, stored: str
) -> None:
    assert session_name(tenant, session_id) == stored
    assert tenant_and_id(stored) == (tenant, session_id)


def test_a_request_without_a_session_has_no_name() -> None:
    assert session_name("a/b", "") == ""
