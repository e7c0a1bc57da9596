"""Whose a gateway's id is, over its sessions' lives."""

from __future__ import annotations

from pointsman.router.core.gateway_claims import GatewayClaims

MINE, THEIRS = b"m" * 16, b"t" * 16


def test_an_id_is_its_first_ones_until_a_lease_after_its_last_session() -> None:
    claims = GatewayClaims(lease_s=15.0)
    assert claims.claim("g", MINE, 0.0)
    claims.opened("g")
    assert not claims.claim("g", THEIRS, 1_000.0)
    assert claims.claim("g", MINE, 1_000.0)  # a second stream, when the first is lost unnoticed
    claims.closed("g", 1_000.0)
    assert not claims.claim("g", THEIRS, 1_014.9)
    assert claims.claim("h", THEIRS, 1_014.9)
    assert claims.claim("g", THEIRS, 1_015.0)
    assert not claims.claim("g", MINE, 1_015.0)


def test_a_session_that_never_opens_leaves_nothing_behind() -> None:
    claims = GatewayClaims(lease_s=15.0)
    assert claims.claim("g", MINE, 0.0)
    assert not claims.claim("g", THEIRS, 14.0)
    claims.expire(14.0)
    assert len(claims) == 1
    claims.expire(15.0)
    assert len(claims) == 0


def test_a_lease_that_begins_again_lasts_whole() -> None:
    claims = GatewayClaims(lease_s=15.0)
    assert claims.claim("g", MINE, 0.0)
    assert claims.claim("g", MINE, 10.0)
    assert not claims.claim("g", THEIRS, 20.0)
