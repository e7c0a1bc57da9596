"""Fixtures: one fleet of processes for all tests of this folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.processes.fleet import Fleet
from tests.support.repository import REPOSITORY


@pytest.fixture(scope="package")
def clocks(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The library with which each process can have its own wall clock; None without a C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    made = tmp_path_factory.mktemp("clock") / "clock.so"
    source = REPOSITORY / "tests/support/processes/clock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", made, source], check=True)
    return made


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def fleet(tmp_path_factory: pytest.TempPathFactory, clocks: Path | None) -> AsyncIterator[Fleet]:
    """The running fleet."""
    folder = tmp_path_factory.mktemp("fleet")
    # {name} is replaced by the router's name
    router, gateway = folder / "decisions-{name}.jsonl", folder / "breakdown.jsonl"
    up = Fleet(folder, clocks=clocks, router={"decision_log_file": router}, gateway={"breakdown_file": gateway})
    try:
        await up.start()
        yield up
    finally:
        await up.stop()
