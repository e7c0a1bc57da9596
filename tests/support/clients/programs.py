"""Runs clients' own code: the programs ask.py and ask.mjs of this folder, in the environment that `make env-clients` makes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CLIENTS = HERE.parents[2] / ".venv-clients"
WITHIN_S = 240.0


@dataclass(frozen=True)
class Case:
    """A request. `url`: without /v1."""

    case: str
    url: str
    key: str = "sk-none"
    model: str = "m"
    prompt: str = "Hello"
    stream: bool = False


async def asked(cases: list[Case]) -> dict[tuple[str, str], str]:
    """Have each client send each case; return what it makes of the answer, by client and case."""
    if not (CLIENTS / ".installed").exists():
        pytest.fail("the clients are missing: `make env-clients` makes .venv-clients", pytrace=False)
    binaries = CLIENTS / "bin"
    programs = ((binaries / "python", HERE / "ask.py"), (binaries / "node", HERE / "ask.mjs", CLIENTS))
    given = json.dumps(list(map(asdict, cases))).encode()
    answers = await asyncio.gather(*(_run(program, given) for program in programs))
    return {(found["client"], found["case"]): found["saw"] for answer in answers for found in answer}


async def _run(program: tuple[Path, ...], given: bytes) -> list[dict[str, str]]:
    piped = asyncio.subprocess.PIPE
    # Clients take keys, addresses and proxies from the environment, too.
    process = await asyncio.create_subprocess_exec(*program, stdin=piped, stdout=piped, stderr=piped, env={})
    try:
        async with asyncio.timeout(WITHIN_S):
            out, errors = await process.communicate(given)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-2_000:]
    found: list[dict[str, str]] = json.loads(out)
    return found
