"""Runs a router in front of engines until it is no longer needed."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.rivals.contenders import Contender, LaunchContext, Part, part_label
from bench.rivals.engines import Fleet
from bench.rivals.environments import NotRunnable
from bench.rivals.process_cpu import descendants
from pointsman_common.io.direct_http import open_directly
from tests.support.processes.process import Process, ProcessFailure, free_port

READY_S = 120.0
# Time that a router has after its first answer, s: some register their engines one by one.
SETTLE_S = 2.0
# Number of free ports that a router is given.
PORTS = 4


@dataclass
class RunningRouter:
    """A router that answers. `parts` are its programs and their processes."""

    url: str
    parts: Sequence[tuple[Part, Process]]

    def processes(self, *, counted: bool = True) -> dict[str, list[int]]:
        """Return the processes by the name under which they are counted: the router's, or those that are not."""
        found: dict[str, list[int]] = defaultdict(list)
        for part, process in self.parts:
            if part.counted is counted:
                for pid in descendants(process.pid):
                    with contextlib.suppress(OSError):
                        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                        found[part_label(part, words)].append(pid)
        return dict(found)


@contextlib.contextmanager
def running_router(contender: Contender, fleet: Fleet, folder: Path) -> Iterator[RunningRouter]:
    """Run a router in front of `fleet` until the end of the block. Raises NotRunnable if it does not answer in READY_S."""
    ports = [free_port() for _ in range(PORTS)]
    launch = LaunchContext(
        fleet.engines, ports, folder, fleet.model, fleet.tokenizer, fleet.block_size, fleet.kv_blocks, fleet.context
    )
    parts = [
        (part, Process(f"{part.name}-{number}", part.argv, folder / f"{part.name}-{number}.log", part.env))
        for number, part in enumerate(contender.parts(launch))
    ]
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        for _, process in parts:
            process.start()
        try:
            parts[-1][1].wait_ready(lambda: _answers(url, fleet, contender.is_pointsman), within_s=READY_S)
        except ProcessFailure as error:
            raise NotRunnable(_reason(error)) from error
        time.sleep(SETTLE_S)
        yield RunningRouter(url, parts)
    finally:
        # Together: each of Dynamo's workers takes some seconds.
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(_stop, [process for _, process in parts]))


def _stop(process: Process) -> None:
    with contextlib.suppress(AssertionError):
        process.stop(within_s=45)


def _answers(url: str, fleet: Fleet, reports_instances: bool) -> bool:
    """Whether a router knows its engines, as far as it tells, and answers a chat of some words."""
    try:
        if reports_instances:
            with open_directly(f"{url}/health", 5) as response:
                health = json.loads(response.read())
            if health.get("status") != "ok" or f'"instances":{len(fleet.engines)},' not in json.dumps(health).replace(
                " ", ""
            ):
                return False
        chat = {"model": fleet.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(chat).encode(), {"Content-Type": "application/json"}
        )
        with open_directly(request, 30) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def _reason(error: Exception) -> str:
    """Return the last line that says anything, for the page."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("---")]
    return f"it did not answer within {READY_S:.0f} s: {lines[-1][:200] if lines else 'no message'}"
