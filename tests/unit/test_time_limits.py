"""The time limits of tests."""

from __future__ import annotations

import pytest

from tests.conftest import COMPUTE_S


def test_a_test_that_only_computes_may_take_long_on_a_busy_machine(request: pytest.FixtureRequest) -> None:
    """A pure test has taken 100 s, ten times its CPU time, where those that start processes are given 120 s."""
    limit = request.node.get_closest_marker("timeout")
    assert limit is not None
    assert limit.args == (COMPUTE_S,)
    assert 5 * float(request.config.getini("timeout")) < COMPUTE_S
