"""The README's commands are run as they stand there, on a router of the test's own port."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from services import cli
from tests.integration.router_fixtures import Report, Session, eventually, running

README = Path(__file__).parents[2] / "README.md"
DEFAULT_ROUTER = "127.0.0.1:50051"


def commands(program: str) -> list[str]:
    """The README's command lines that begin with `program`, continued lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.startswith(program + " ")]


@pytest.mark.parametrize("command", commands("buf"))
async def test_reflection_calls_work_as_written(command: str) -> None:
    async with running() as (server, client):
        await Report(client).join("a")
        session = Session(client)
        await session.hello()

        async def placed() -> bool:
            return bool(await client.instances())

        await eventually(placed, "the instance is known")
        await session.place("r")
        _, *arguments = shlex.split(command.replace(DEFAULT_ROUTER, f"127.0.0.1:{server.port}"))
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).parent / "buf", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        if "--list-services" in arguments:
            assert "pointsman.router.v1.FleetService" in out.decode().split()
        else:
            assert json.loads(out), "an empty answer tells nobody anything"


def test_there_are_reflection_calls_to_check() -> None:
    assert len(commands("buf")) >= 4


def test_every_pointsman_command_in_the_readme_exists() -> None:
    for register in cli.GROUPS:
        register()
    group = typer.main.get_command(cli.app)
    known = set(group.commands)  # type: ignore[attr-defined]
    used = set(re.findall(r"\bpointsman ([a-z-]+)", "\n".join(commands("pointsman"))))
    shown = set(re.findall(r"^\$ pointsman ([a-z-]+)", README.read_text(), re.MULTILINE))
    assert used
    assert {"explain", "decisions", "what-if", "set-policy"} <= shown
    assert used | shown <= known
    named = {name for names in cli.GROUPS.values() for name in names}
    assert named == known
