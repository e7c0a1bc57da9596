"""Page sizes and page tokens: the request that a token belongs to, and the position after which it continues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.router.v1 import fleet_pb2
from pointsman_router.io.rpc.pages import InvalidPageToken, page_size, position_of, token_after


def sessions(text: str = "", token: str = "", size: int = 0) -> fleet_pb2.ListSessionsRequest:
    return fleet_pb2.ListSessionsRequest(text=text, page_token=token, page_size=size)


def test_sizes_are_bounded() -> None:
    assert [page_size(asked) for asked in (0, 1, 1_000, 1_001)] == [50, 1, 1_000, 1_000]
    assert page_size(0, default=1_000) == 1_000
    with pytest.raises(ValueError, match="negative"):
        page_size(-1)


@given(st.text(max_size=20))
def test_a_token_stands_for_its_position(position: str) -> None:
    token = token_after(position, sessions("t"), "r1")
    assert position_of(sessions("t", token, size=7), "r1", str) == position
    assert position_of(sessions("t"), "r1", str) is None


def test_a_token_is_good_for_its_request_at_its_router_alone() -> None:
    token = token_after(5, sessions("t"), "r1")
    for request, router_id in ((sessions("u", token), "r1"), (sessions("t", token), "r2")):
        with pytest.raises(InvalidPageToken):
            position_of(request, router_id, int)
    other = fleet_pb2.ListDecisionsRequest(page_token=token_after(5, sessions(), "r1"))
    with pytest.raises(InvalidPageToken):
        position_of(other, "r1", int)
    with pytest.raises(InvalidPageToken):
        position_of(sessions("t", token), "r1", str)


@given(st.text(min_size=1, max_size=60) | st.binary(min_size=1).map(bytes.hex))
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidPageToken):
        position_of(sessions(token=token), "r1", int)
