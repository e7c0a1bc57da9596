"""Starts commands of `pointsman` as processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.processes.process import Process


def pointsman_command(*words: str) -> list[str]:
    """Return the command line of `pointsman WORDS...`, run by this environment's Python."""
    return [sys.executable, "-m", "pointsman_cli.main", *words]


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Return a flag for each setting, and one per value for a list. Names may be a setting's or already a flag's."""
    words: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.removeprefix("--").replace("_", "-")
        for item in value if isinstance(value, list) else [value]:
            words += [flag, str(item)]
    return words


def pointsman_process(
    name: str,
    folder: Path,
    command: str,
    *words: str,
    flags: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Process:
    """Return a process of `pointsman COMMAND FLAGS WORDS...` that is not started. Its log is FOLDER/NAME.log."""
    argv = pointsman_command(command, *flag_words(flags or {}), *words)
    return Process(name, argv, folder / f"{name}.log", env or {}, cwd)


def plane_process(
    folder: Path, listen: str, router: str, engines: Sequence[int | str], *words: str, cwd: Path | None = None
) -> Process:
    """Return `pointsman up` in front of these engines, without console and metrics, that is not started. `listen`, `router`:
    HOST:PORT of the gateway and of the router. `engines`: ports of this host, or what `--engine` takes. `words`: more flags."""
    flags = {
        "listen": listen,
        "router_listen": router,
        "console": "",
        "router_metrics": "",
        "agent_metrics": "",
        "engine": [f"http://127.0.0.1:{at}" if isinstance(at, int) else at for at in engines],
        "state_dir": folder / "agent",
    }
    return pointsman_process("plane", folder, "up", *flag_words(flags), *words, cwd=cwd)


def wait_until_it_serves(plane: Process, within_s: float = 120.0) -> None:
    """Wait until a `plane_process` that was started says that it serves."""
    plane.wait_ready(lambda: "OpenAI API" in plane.log.read_text(), within_s=within_s)


@asynccontextmanager
async def control_plane(folder: Path, listen: str, router: str, ports: Sequence[int]) -> AsyncIterator[Process]:
    """Run a `plane_process`, from when it says that it serves."""
    plane = plane_process(folder, listen, router, ports)
    plane.start()
    try:
        await asyncio.to_thread(wait_until_it_serves, plane)
        yield plane
    finally:
        plane.stop(within_s=40)
