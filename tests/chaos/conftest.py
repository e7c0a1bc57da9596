"""One fleet of processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.fleet import Fleet


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """All processes, running."""
    folder = tmp_path_factory.mktemp("fleet")
    # {name}: of the router
    router, gateway = folder / "decisions-{name}.jsonl", folder / "breakdown.jsonl"
    up = Fleet(folder, router={"decision_log_file": router}, gateway={"breakdown_file": gateway})
    try:
        await up.start()
        yield up
    finally:
        await up.stop()
