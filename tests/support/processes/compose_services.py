"""Runs the compose file's services as processes, with its commands, environment, secrets, files and health checks.

Only the work of a container runtime is replaced: names become the loopback address, ports free ones, and mounts the test's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.support.processes.process import free_port
from tools import check_deploy
from tools.deploy_checks import compose, service_environment

FILE = check_deploy.DEPLOY / "compose/compose.yaml"
BIN = Path(sys.executable).parent
# Ports of services whose settings, command and health check name no port with an address.
PORTS = {"redis": {"6379"}}


@dataclass
class Stack:
    """The services of the chosen profiles. `ports` maps (name, port in the container) to the port on this machine."""

    folder: Path
    services: dict[str, dict[str, Any]]
    secrets_of: dict[str, str]
    scheme: str = "http"
    ports: dict[tuple[str, str], int] = field(default_factory=dict)
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    def secret(self, name: str) -> str:
        """Return the secret in the file `name`."""
        return (self.folder / "secrets" / name).read_text().strip()

    def url(self, name: str, port: str) -> str:
        """Return the base URL of a service's port on this machine."""
        return f"{self.scheme}://127.0.0.1:{self.ports[name, port]}"

    def local(self, name: str, text: str) -> str:
        """Return `text` of service `name` with this machine's paths, addresses and ports."""
        for mount, here in sorted(self._mounts(name).items(), key=lambda item: -len(item[0])):
            text = re.sub(rf"(?<![\w./-]){re.escape(mount)}(?![\w-])", str(here), text)
        for (service, port), own in self.ports.items():
            text = re.sub(rf"(?<![\w.-]){service}:{port}\b", f"127.0.0.1:{own}", text)
            if service == name:
                text = re.sub(rf"\b(0\.0\.0\.0|127\.0\.0\.1):{port}\b", rf"\g<1>:{own}", text)
                text = re.sub(rf"(\btcp://\*:|^--port=){port}\b", rf"\g<1>{own}", text)
                text = str(own) if text == port else text
        return text

    def environment(self, name: str) -> dict[str, str]:
        """Return a service's environment: only the variables of the compose file, and the paths of programs."""
        variables = {
            key: self.local(name, str(value)) for key, value in self.services[name].get("environment", {}).items()
        }
        programs = {"PATH": f"{self.folder / 'bin'}:{BIN}:{os.environ['PATH']}", "HOME": str(self.folder)}
        if path := os.environ.get("PYTHONPATH"):
            programs["PYTHONPATH"] = path
        return {**programs, **variables}

    async def start(self, name: str, prepare: Callable[[Path], None] = lambda mounts: None) -> None:
        """Make a service's mounted secrets and files, and start it. `prepare` may change these files before the start."""
        service = self.services[name]
        self._mount(name)
        prepare(self.folder / name)
        entrypoint = service.get(
            "entrypoint", ["pointsman"] if service_environment.subcommand_of(service["image"]) else []
        )
        words = [self.local(name, word) for word in [*entrypoint, *service["command"]]]
        if name == "redis":
            port = [] if "--tls-port" in words else ["--port", str(self.ports[name, "6379"])]
            words += [*port, "--bind", "127.0.0.1", "--dir", str(self.folder)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                *words, env=self.environment(name), cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )

    async def stop(self, name: str) -> None:
        """Stop a service as a container runtime does: SIGTERM, and SIGKILL after 15 s."""
        process = self.processes.pop(name)
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 15)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def kill(self, name: str) -> None:
        """Kill a service, which notices nothing."""
        process = self.processes.pop(name)
        process.kill()
        await process.wait()

    def copy(self, name: str, copied: str) -> None:
        """Add a service with the definition of another one, with ports and volumes of its own."""
        text = re.sub(rf"(?<![\w.-]){name}-data:", f"{copied}-data:", yaml.safe_dump(self.services[name]))
        self.services[copied] = yaml.safe_load(text)
        self.ports |= {(copied, port): free_port() for service, port in list(self.ports) if service == name}

    def log(self, name: str) -> str:
        """Return the service's log."""
        return (self.folder / f"{name}.log").read_text()

    async def healthy(self, name: str) -> bool:
        """Return whether the service's health check passes, though the environment names a proxy, which is not there. Raises
        AssertionError if its process has ended."""
        assert self.processes[name].returncode is None, f"{name} ended:\n{self.log(name)}"
        kind, *check = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        if name == "redis":
            # The redis-cli of the tests is too old for -e, which makes an error reply a failure.
            check = ["redis-cli", "-p", str(self.ports[name, "6379"]), *(word for word in check[1:] if word != "-e")]
        words = [self.local(name, word) for word in check]
        environment = {"http_proxy": f"http://127.0.0.1:{free_port()}", **self.environment(name)}
        probe = await asyncio.create_subprocess_exec(
            *words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return await probe.wait() == 0

    async def until_healthy(self, *names: str) -> None:
        """Wait until health checks pass, without a timeout other than the test's."""
        for name in names:
            while not await self.healthy(name):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.2)

    async def start_control_plane(self) -> None:
        """Start Redis, router, emulated engines, agent and gateway in the order of `depends_on`; wait until all are healthy."""
        for name in ("redis", "emulated-0", "emulated-1"):
            await self.start(name)
        await self.until_healthy("redis")
        await self.start("router")
        await self.until_healthy("router", "emulated-0", "emulated-1")
        for name in ("gateway", "agent-emulated"):
            await self.start(name)
        await self.until_healthy("agent-emulated", "gateway")

    def _mounts(self, name: str) -> dict[str, Path]:
        """Return path in the container -> path on this machine, of secrets, volumes and files."""
        found = {"/run/secrets": self.folder / name / "secrets"}
        for volume in self.services[name].get("volumes", []):
            source, target = volume.split(":")[:2]
            found[target] = self.folder / name / target.strip("/") if source[0] in "./" else self.folder / source
        return found

    def _mount(self, name: str) -> None:
        service = self.services[name]
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2]
            here = self._mounts(name)[target]
            if source[0] not in "./":
                here.mkdir(exist_ok=True)
                continue
            # Files that scripts make are in the test's folder.
            given = (self.folder if source.startswith("./") else FILE.parent) / source
            for file in given.rglob("*") if given.is_dir() else [given]:
                copied = here / file.relative_to(given) if given.is_dir() else here
                copied.parent.mkdir(parents=True, exist_ok=True)
                if not file.is_dir():
                    copied.write_text(self.local(name, file.read_text()))
        mounted = self.folder / name / "secrets"
        mounted.mkdir(parents=True, exist_ok=True)
        for secret in service.get("secrets", []):
            source, target = (secret["source"], secret["target"]) if isinstance(secret, dict) else (secret, secret)
            file = self.folder / self.secrets_of[source]
            (mounted / target).write_text(self.local(name, file.read_text()))


@asynccontextmanager
async def compose_stack(
    folder: Path, *profiles: str, tls: bool = False, above: Sequence[str] = (), **variables: str
) -> AsyncIterator[Stack]:
    """Prepare the services without a profile and those of `profiles`; none is started. Stop all after the block.

    `above`: compose files to merge over the main one. `tls`: merge tls.yaml, too. `variables` override those of .env.example.
    """
    example, _ = compose.example_env(FILE.with_name(".env.example").read_text())
    file_content = yaml.safe_load(FILE.read_text())
    for name in above:
        file_content = compose.merge(file_content, yaml.safe_load(FILE.with_name(name).read_text()))
    if tls:
        file_content = compose.merge(file_content, yaml.safe_load(FILE.with_name("tls.yaml").read_text()))
        made = check_deploy.run(check_deploy.DEPLOY / "make-certificates.sh", folder / "tls")
        assert made.returncode == 0, made.stderr
    project = compose.interpolate(file_content, example | variables)
    active = {
        name: service
        for name, service in project["services"].items()
        if not service.get("profiles") or set(profiles) & set(service["profiles"])
    }
    check_deploy.make_secrets(folder / "secrets")
    secrets = {name: secret["file"] for name, secret in project["secrets"].items()}
    stack = Stack(folder, active, secrets, "https" if tls else "http")
    for name, service in active.items():
        keys = ("environment", "healthcheck", "ports", "command")
        text = str([service.get(key) for key in keys])
        inside = PORTS.get(name) or set(re.findall(r"(?:0\.0\.0\.0|127\.0\.0\.1):(\d+)", text))
        inside |= set(re.findall(r"\btcp://\*:(\d+)", text))
        inside |= {str(v) for k, v in service.get("environment", {}).items() if k.endswith("_PORT")}
        for port in sorted(inside):
            here = free_port()
            stack.ports |= {(alias, port): here for alias in compose.names(name, service)}
    (folder / "bin").mkdir()
    for program in ("redis-server", "redis-cli"):
        # Debian's program is preferred: the one of the Python environment has no TLS.
        if found := shutil.which(program, path="/usr/bin:/usr/local/bin:/opt/homebrew/bin"):
            (folder / "bin" / program).symlink_to(found)
    probe = folder / "bin/pointsman-probe"
    probe.write_text(f'#!/bin/sh\nexec {sys.executable} {check_deploy.DEPLOY / "docker/probe.py"} "$@"\n')
    probe.chmod(0o755)
    try:
        yield stack
    finally:
        for process in stack.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for name in list(stack.processes):
            await stack.stop(name)
        shutil.rmtree(folder / "prometheus-data", ignore_errors=True)
