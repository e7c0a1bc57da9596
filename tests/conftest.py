"""What holds for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# Their assertions say what they compared.
pytest.register_assert_rewrite("tests.support")

# An example's time is no property of the code: a machine that stalls would fail it.
settings.register_profile("pointsman", deadline=None)
settings.load_profile("pointsman")


def pytest_configure(config: pytest.Config) -> None:
    from tests.support.leaks import Leaks  # Not before its assertions are to be rewritten.

    config.pluginmanager.register(Leaks(), "leaks")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long a fleet took to recover from each fault, where faults were tested."""
    trouble = sys.modules.get("tests.support.fault_under_load")
    if trouble is not None and (rows := trouble.recovery_table()):
        terminalreporter.section("recovery from faults")
        for row in rows:
            terminalreporter.write_line(row)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command that runs inside a test sends the log to what is its stderr then: the next test's lines shall not go there."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
