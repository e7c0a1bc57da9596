"""CPU time of a router for the changes of keys that the agents of busy engines report, merged at its pace and one by one."""

from __future__ import annotations

import asyncio
import sys
import time

from bench import stack
from bench.busy_engines import STEPS_PER_S
from bench.figures import Figure
from bench.stack import ServerProcess

# Few enough that a router keeps up with a message for each of their changes, so that both ways can be measured.
INSTANCES = 200
MEASURED_S = 6.0


async def key_changes() -> list[Figure]:
    """key_changes_cpu: share of a core for the reports of INSTANCES busy engines; baseline: without the pace, in the same run."""
    cpu, messages = {}, {}
    for mode in ("each", "paced"):
        async with stack.router() as (address, served):
            cpu[mode], messages[mode] = await _measured(address, served, mode)
    note = (
        f"share of a core, {INSTANCES} engines whose keys change {STEPS_PER_S} times a second, {messages['paced']:,.0f} messages "
        f"a second in place of {messages['each']:,.0f}; baseline: a message for each change"
    )
    return [Figure("key_changes_cpu", cpu["paced"], "", cpu["each"], note)]


async def _measured(address: str, served: ServerProcess, mode: str) -> tuple[float, float]:
    """Return the router's CPU time per second, and the number of messages about keys per second."""
    command = ("-m", "bench.busy_engines", address, str(INSTANCES), mode)
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if await child.stdout.readline() != b"ready\n":
            raise RuntimeError("the engines did not start")
        began, before = time.perf_counter(), stack.cpu_s(*served.pids)
        await asyncio.sleep(MEASURED_S)
        spent, cpu_s = time.perf_counter() - began, stack.cpu_s(*served.pids) - before
        child.stdin.close()
        messages = int(await child.stdout.readline())
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
    return cpu_s / spent, messages / spent
