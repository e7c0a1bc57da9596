"""Wall clocks jump under load. No part uses its wall clock for waiting, and no two wall clocks are compared."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from tests.support.fault_under_load import fault_under_load
from tests.support.processes.fleet import Fleet

# How long the clocks are wrong, and by how much, s.
WRONG_S, HOUR_S = 2.5, 3_600.0


@pytest.mark.asyncio(loop_scope="package")
async def test_every_clock_jumps_and_jumps_back(fleet: Fleet, clocks: Path | None) -> None:
    """Each part's clock jumps by an hour, ahead and back in turn. Then all are corrected, which is a jump the other way."""
    if clocks is None:
        pytest.skip("there is no C compiler")
    async with fault_under_load(fleet, "clocks jump by an hour"):
        for at, name in enumerate(fleet.parts):
            fleet.clock(name, HOUR_S if at % 2 else -HOUR_S)
        with redis.Redis(port=fleet.ports["redis"]) as client:
            redis_s, _ = client.time()
        assert abs(time.time() - redis_s - HOUR_S) < 60.0, "the first part is Redis"
        await asyncio.sleep(WRONG_S)
        for name in fleet.parts:
            fleet.clock(name, 0.0)


def test_a_service_reads_the_clock_that_jumps(tmp_path: Path, clocks: Path | None) -> None:
    """Check that the test above can fail."""
    if clocks is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "clock").write_bytes(int(-HOUR_S * 1e9).to_bytes(8, sys.byteorder, signed=True))
    env = {"LD_PRELOAD": str(clocks), "TEST_CLOCK": str(tmp_path / "clock")}
    asking = "import time; print(time.time(), time.monotonic())"
    readings = [
        [
            float(reading)
            for reading in subprocess.check_output([sys.executable, "-c", asking], text=True, env=it).split()
        ]
        for it in (env, {})
    ]
    assert 0.0 < readings[1][0] - readings[0][0] - HOUR_S < 60.0
    assert 0.0 < readings[1][1] - readings[0][1] < 60.0
