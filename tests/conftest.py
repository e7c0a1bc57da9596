"""Configuration that applies to all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

# With this, a failed assertion of tests.support shows the compared values.
pytest.register_assert_rewrite("tests.support")

# Neither a time limit per example nor one for drawing it: a machine that stalls would fail a correct test.
settings.register_profile("pointsman", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pointsman")

# Tests that only compute, and their time limit, s. A busy machine makes them slow, above all at a low priority, and this still
# finds a hang. Hypothesis takes the end of a limit for a failed example, and calls it flaky when it passes again.
COMPUTE = ("tests/unit/", "tests/virtual/")
COMPUTE_S = 900


def pytest_configure(config: pytest.Config) -> None:
    # Imported only after their assertions are registered for rewriting.
    from tests.support.cpu_report import CpuReport
    from tests.support.leaks import Leaks

    config.pluginmanager.register(Leaks(), "leaks")
    config.pluginmanager.register(CpuReport(), "cpu report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that only compute their time limit. A test's own limit, a mark, comes first."""
    for item in items:
        if item.nodeid.startswith(COMPUTE) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(COMPUTE_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long a fleet took to recover from each fault, if fault tests ran."""
    trouble = sys.modules.get("tests.support.fault_under_load")
    if trouble is not None and (rows := trouble.recovery_table()):
        terminalreporter.section("recovery from faults")
        for row in rows:
            terminalreporter.write_line(row)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Restore the structlog configuration after each test: a command run in a test binds the log to that test's stderr."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
