"""The Dockerfiles, the health probe inside the image, and the script that runs all checks."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import grpc.aio
import pytest
from aiohttp import web
from grpc_health.v1 import _async as async_health
from grpc_health.v1 import health_pb2, health_pb2_grpc
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pointsman_common.io.channel import SERVER_OPTIONS
from tests.support.processes.process import free_port
from tools import check_deploy
from tools.deploy_checks import service_environment

PROBE = check_deploy.DEPLOY / "docker/probe.py"


@pytest.mark.parametrize("name", ["Dockerfile", "engine.Dockerfile"])
def test_dockerfile_is_sound(name: str) -> None:
    assert check_deploy.check_dockerfile(check_deploy.DEPLOY / "docker" / name) == []


def test_dockerfile_mistakes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text("FROM python:latest\nCOPY requirements/nothing.lock x\n")
    problems = check_deploy.check_dockerfile(file)
    assert any("DL3007" in line for line in problems)
    assert "COPY requirements/nothing.lock: no such file here" in problems


def test_missing_tool_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check_deploy, "BIN", tmp_path)
    assert "is missing" in check_deploy.check_dockerfile(check_deploy.DEPLOY / "docker/Dockerfile")[0]
    assert "is missing" in check_deploy.check_compose(check_deploy.DEPLOY / "compose/compose.yaml")[0]


def packages_of(extra: str) -> set[str]:
    """Return the names of all packages that `pip install pointsman[extra]` brings."""
    wanted, seen = [Requirement(f"pointsman[{extra}]")], set()
    found: set[str] = set()
    while wanted:
        one = wanted.pop()
        found.add(canonicalize_name(one.name))
        if str(one) not in seen:
            seen.add(str(one))
            needed = [Requirement(line) for line in metadata.requires(one.name) or ()]
            extras = one.extras or {""}
            wanted += [r for r in needed if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)]
    return found


def test_images_install_their_own_packages_alone() -> None:
    lock = (check_deploy.ROOT / "requirements/dev.lock").read_text()
    parts = [image.removeprefix("pointsman-") for image in service_environment.IMAGES]
    locked = {part: packages_of(part) & set(re.findall(r"^([\w-]+)==", lock, re.MULTILINE)) for part in parts}
    only_theirs = {
        "pyzmq": {"agent", "lab"},
        "redis": {"router"},
        "tokenizers": {"gateway", "lab"},
        "matplotlib": {"lab"},
    }
    for package, owners in only_theirs.items():
        assert {part for part in parts if package in locked[part]} == owners
    for part in parts:
        dockerfile = (check_deploy.DEPLOY / "docker/Dockerfile").read_text()
        assert part in re.findall(r"\w+", re.findall(r"PART:\?([^}]+)", dockerfile)[0])


async def probe(*arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(PROBE), *arguments, stderr=subprocess.PIPE)
    _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


async def test_grpc_probe() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    servicer = async_health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        assert await probe("grpc", address) == (0, "")
        await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert await probe("grpc", address) == (1, f"{address}: NOT_SERVING\n")
        await servicer.set("part", health_pb2.HealthCheckResponse.SERVING)
        assert await probe("grpc", address, "part") == (0, "")
    finally:
        await server.stop(None)
    status, reason = await probe("grpc", address)
    assert status == 1
    assert "UNAVAILABLE" in reason


async def test_the_probe_tells_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in an environment with a proxy, as Docker gives it to containers."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=int(request.match_info["status"]))

    app = web.Application()
    app.router.add_get("/{status}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        assert await probe("http", f"{url}/200") == (0, "")
        status, reason = await probe("http", f"{url}/503")
        assert status == 1
        assert "503" in reason
    finally:
        await runner.cleanup()
    assert (await probe("http", url))[0] == 1


async def test_probe_says_how_it_is_used() -> None:
    assert (await probe("tcp", "127.0.0.1:1"))[0] == 2
    assert (await probe("http", "http://127.0.0.1:1", "part"))[0] == 2
    assert (await probe())[0] == 2
