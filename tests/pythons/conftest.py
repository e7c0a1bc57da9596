"""Fixtures of the tests on other versions of Python: the wheel of this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import wheel
from tests.support.repository import REPOSITORY


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    return wheel.build(REPOSITORY, tmp_path_factory.mktemp("dist"))
