"""The compose file's profile `emulated`, run as processes with the commands, environment, secrets and health checks that
it says. Only what a container runtime does is replaced: names become the loopback address, ports free ones, and mounted
folders folders of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import yaml

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from services.common.auth import bearer
from tools import check_deploy
from tools.deploycheck.compose import example_env, interpolate

FILE = check_deploy.DEPLOY / "compose/compose.yaml"
BIN = Path(sys.executable).parent
PROFILE = "emulated"


@dataclass
class Stack:
    """The services of the profile, each a process. `ports` maps (service, its port in the container) to the port here."""

    folder: Path
    services: dict[str, dict[str, Any]]
    ports: dict[tuple[str, str], int] = field(default_factory=dict)
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    def secret(self, name: str) -> str:
        """The secret in the file `name`."""
        return (self.folder / "secrets" / name).read_text().strip()

    def local(self, name: str, text: str) -> str:
        """`text` of service `name` as it must read on this machine."""
        text = text.replace("/run/secrets", str(self.folder / name)).replace(
            "/var/lib", str(self.folder / f"{name}-data")
        )
        for (service, port), here in self.ports.items():
            text = re.sub(rf"(?<![\w.-]){service}:{port}\b", f"127.0.0.1:{here}", text)
            if service == name:
                text = re.sub(rf"\b(0\.0\.0\.0|127\.0\.0\.1):{port}\b", rf"\g<1>:{here}", text)
                text = str(here) if text == port else text
        return text

    def environment(self, name: str) -> dict[str, str]:
        """Nothing but what the compose file says, and where programs are."""
        told = {key: self.local(name, str(value)) for key, value in self.services[name].get("environment", {}).items()}
        return {"PATH": f"{self.folder / 'bin'}:{BIN}:{os.environ['PATH']}", "HOME": str(self.folder), **told}

    async def start(self, name: str) -> None:
        """Start a service, its mounted secrets first."""
        service = self.services[name]
        mounted = self.folder / name
        mounted.mkdir()
        for secret in service.get("secrets", []):
            source, target = (secret["source"], secret["target"]) if isinstance(secret, dict) else (secret, secret)
            file = self.folder / self.secrets_of[source]
            (mounted / target).write_text(self.local(name, file.read_text()))
        entrypoint = service.get("entrypoint", ["pointsman"] if service["image"].startswith("pointsman:") else [])
        words = [self.local(name, word) for word in [*entrypoint, *service["command"]]]
        if name == "redis":
            words += ["--port", str(self.ports[name, "6379"]), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *words, env=self.environment(name), cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )

    secrets_of: dict[str, str] = field(default_factory=dict)

    async def healthy(self, name: str) -> bool:
        """Whether the service's health check passes. Fails the test when its process has ended."""
        log = (self.folder / f"{name}.log").read_text()
        assert self.processes[name].returncode is None, f"{name} ended:\n{log}"
        kind, *check = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        if (
            name == "redis"
        ):  # Its client's -e, which makes an error reply a failure, is newer than the one in the tests.
            check = ["redis-cli", "-p", str(self.ports[name, "6379"]), "ping"]
        words = [self.local(name, word) for word in check]
        probe = await asyncio.create_subprocess_exec(
            *words, env=self.environment(name), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return await probe.wait() == 0

    async def until_healthy(self, *names: str) -> None:
        """Wait for health checks to pass; the test's own timeout ends it."""
        for name in names:
            while not await self.healthy(name):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.2)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    variables, _ = example_env(FILE.with_name(".env.example").read_text())
    project = interpolate(yaml.safe_load(FILE.read_text()), variables)
    active = {n: s for n, s in project["services"].items() if PROFILE in s.get("profiles", [PROFILE])}
    check_deploy.make_secrets(tmp_path / "secrets")
    stack = Stack(tmp_path, active)
    stack.secrets_of = {name: secret["file"] for name, secret in project["secrets"].items()}
    with contextlib.ExitStack() as free:
        for name, service in active.items():
            text = str([service.get("environment"), service.get("healthcheck"), service.get("ports")])
            inside = {"6379"} if name == "redis" else set(re.findall(r"(?:0\.0\.0\.0|127\.0\.0\.1):(\d+)", text))
            inside |= {str(v) for k, v in service.get("environment", {}).items() if k.endswith("_PORT")}
            for port in sorted(inside):
                taken = free.enter_context(socket.create_server(("127.0.0.1", 0)))
                stack.ports[name, port] = taken.getsockname()[1]
    (tmp_path / "bin").mkdir()
    probe = tmp_path / "bin/pointsman-probe"
    probe.write_text(f'#!/bin/sh\nexec {sys.executable} {check_deploy.DEPLOY / "docker/probe.py"} "$@"\n')
    probe.chmod(0o755)
    try:
        yield stack
    finally:
        for process in stack.processes.values():
            if process.returncode is None:
                process.terminate()
        for process in stack.processes.values():
            try:
                await asyncio.wait_for(process.wait(), 15)
            except TimeoutError:
                process.kill()
                await process.wait()


async def test_profile_emulated_answers_requests(stack: Stack) -> None:
    for name in ("redis", "emulated-0", "emulated-1"):
        await stack.start(name)
    await stack.until_healthy("redis")
    await stack.start("router")
    await stack.until_healthy("router", "emulated-0", "emulated-1")
    for name in ("gateway", "agent-emulated"):
        await stack.start(name)
    await stack.until_healthy("agent-emulated", "gateway")

    url = f"http://127.0.0.1:{stack.ports['gateway', '8080']}/v1"
    key = {"Authorization": f"Bearer {stack.secret('api-keys').partition(':')[2]}"}
    body = {"messages": [{"role": "user", "content": "Which way does the train go?"}], "max_tokens": 4}
    async with aiohttp.ClientSession() as client:
        async with client.get(f"{url}/models", headers=key) as models:
            body["model"] = (await models.json())["data"][0]["id"]
        async with client.post(f"{url}/chat/completions", json=body) as refused:
            assert refused.status == 401
        async with client.post(f"{url}/chat/completions", json=body, headers=key) as answer:
            assert answer.status == 200, await answer.text()
            assert "X-Pointsman-Degraded" not in answer.headers
            assert answer.headers["X-Pointsman-Instance"]
            assert answer.headers["X-Pointsman-Decision"]

    router = f"127.0.0.1:{stack.ports['router', '50051']}"
    async with grpc.aio.insecure_channel(router) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        request = fleet_pb2.ListInstancesRequest()
        with pytest.raises(grpc.aio.AioRpcError) as stranger:
            await fleet.ListInstances(request)
        assert stranger.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as agent:
            await fleet.ListInstances(request, metadata=bearer(stack.secret("agent")))
        assert agent.value.code() is grpc.StatusCode.PERMISSION_DENIED
        # An instance answers before its keys are complete, so this may take a moment more.
        states: list[int] = []
        while states != [fleet_pb2.INSTANCE_STATE_READY] * 2:
            listed = await fleet.ListInstances(request, metadata=bearer(stack.secret("operator")))
            states = [instance.state for instance in listed.instances]

    password = stack.secret("redis-password")
    for log in stack.folder.glob("*.log"):
        text = log.read_text()
        secrets = [password, *map(stack.secret, ("agent", "gateway", "operator"))]
        assert not any(secret in text for secret in secrets), f"{log.name} shows a secret"
