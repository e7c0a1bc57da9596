"""How often a warning that each message causes is logged."""

from __future__ import annotations

from pointsman_agent.core.warning_limit import WarningLimit


def test_the_first_is_reported_and_then_the_count_of_each_interval() -> None:
    limit = WarningLimit(60.0)
    assert [limit.occurred(at) for at in (5.0, 5.1, 64.9, 65.0, 65.1, 200.0)] == [1, 0, 0, 3, 0, 2]
