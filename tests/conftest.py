"""Configuration that applies to all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# With this, a failed assertion of tests.support shows the compared values.
pytest.register_assert_rewrite("tests.support")

# No time limit per example: a machine that stalls would fail a correct test.
settings.register_profile("pointsman", deadline=None)
settings.load_profile("pointsman")


def pytest_configure(config: pytest.Config) -> None:
    # Imported only after their assertions are registered for rewriting.
    from tests.support.cpu_report import CpuReport
    from tests.support.leaks import Leaks

    config.pluginmanager.register(Leaks(), "leaks")
    config.pluginmanager.register(CpuReport(), "cpu report")


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
