"""What holds for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# Their assertions say what they compared. Here, since whichever folder comes first may import another's.
pytest.register_assert_rewrite(
    *(f"tests.engine.{name}" for name in ("faulty", "offloading", "servers", "stack", "talk")),
    *(f"tests.chaos.{name}" for name in ("fleet", "trouble")),
)

# An example's time is no property of the code: a machine that stalls would fail it.
settings.register_profile("pointsman", deadline=None)
settings.load_profile("pointsman")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long a fleet took to recover from each fault, where faults were tested."""
    trouble = sys.modules.get("tests.chaos.trouble")
    if trouble is not None and (rows := trouble.told()):
        terminalreporter.section("recovery from faults")
        for row in rows:
            terminalreporter.write_line(row)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command that runs inside a test sends the log to what is its stderr then: the next test's lines shall not go there."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
