"""The profile `emulated` in containers."""

from __future__ import annotations

import pytest

from tests.support.containers.compose import Project

pytestmark = pytest.mark.timeout(900)


def test_up(project: Project) -> None:
    project.compose("up", "--detach", "--wait")
    print(project.compose("ps"))
    project.compose("down", "--volumes", "--timeout=10")
