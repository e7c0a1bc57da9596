"""Agents' programs from `make env-clients`: how each is started against a server, and what its end says.

Each run has a home of its own, a dummy key and the settings of deploy/agents where these have the program. Updates and
telemetry are off; what asks for another host all the same meets a proxy that is not there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.clients.programs import CLIENTS
from tests.support.processes.process import free_port
from tests.support.repository import REPOSITORY
from tests.support.waiting import eventually

SETTINGS = REPOSITORY / "deploy/agents"
# What deploy/agents has in the place of a user's own values.
GATEWAY, NAME = "http://127.0.0.1:8080", "qwen3-coder"
_LOOK_S = 0.05


@dataclass(frozen=True)
class Server:
    """A server to ask. `url`: without /v1. `context`: what the program is told of the model's context, in tokens."""

    url: str
    key: str = "none"
    model: str = "tiny"
    context: int = 1_000_000

    def in_settings(self, name: str) -> str:
        """Return a file of deploy/agents with this server's values."""
        text = (SETTINGS / name).read_text()
        for ours, theirs in ((GATEWAY, self.url), (NAME, self.model), ("131072", str(self.context))):
            assert ours in text, name
            text = text.replace(ours, theirs)
        return text


@dataclass(frozen=True)
class Start:
    """A command and its environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """A run's exit status (None: it was stopped), and what it printed."""

    status: int | None
    printed: str


@dataclass(frozen=True)
class Program:
    """`package`: its folder in node_modules. `start` lays the settings into a home and returns how to give it a prompt, `full` is
    what it prints where it knows that the context is full."""

    name: str
    package: str
    start: Callable[[Path, Server, str], Start]
    full: str

    def check(self) -> None:
        """Fail the test if the program is not installed."""
        if not self._described.exists():
            pytest.fail(f"{self.name} is missing: `make env-clients` makes .venv-clients", pytrace=False)

    @property
    def version(self) -> str:
        """The installed version. Fails the test if there is none."""
        self.check()
        version: str = json.loads(self._described.read_text())["version"]
        return version.removesuffix("-linux-x64")

    @property
    def _described(self) -> Path:
        return CLIENTS / "node_modules" / self.package / "package.json"

    def is_full(self, printed: str) -> bool:
        return re.search(self.full, printed) is not None


def _in_package(name: str) -> str:
    return str(CLIENTS / "node_modules" / name)


def _environment(home: Path, **more: str) -> dict[str, str]:
    nowhere = "http://127.0.0.1:9"
    common = {"PATH": f"{CLIENTS / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb", "NO_COLOR": "1"}
    common |= {"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "NO_PROXY": "127.0.0.1,localhost", "DO_NOT_TRACK": "1"}
    return common | more


def _claude(home: Path, server: Server, prompt: str) -> Start:
    lines = [line for line in server.in_settings("claude.env").splitlines() if line and not line.startswith("#")]
    settings = dict(line.split("=", 1) for line in lines)
    settings |= {"ANTHROPIC_AUTH_TOKEN": server.key, "CLAUDE_CODE_MAX_RETRIES": "1", "DISABLE_AUTOUPDATER": "1"}
    settings |= {"DISABLE_TELEMETRY": "1"}
    flags = ("--print", "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash")
    return Start((_in_package(CLAUDE.package) + "/claude", *flags, "--", prompt), _environment(home, **settings))


def _codex(home: Path, server: Server, prompt: str) -> Start:
    (home / "config.toml").write_text("check_for_update_on_startup = false\n" + server.in_settings("codex.toml"))
    flags = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    for name in ("request", "stream"):
        flags += ["-c", f"model_providers.pointsman.{name}_max_retries=1"]
    (program,) = Path(_in_package(CODEX.package)).glob("vendor/*/bin/codex")
    return Start(
        (str(program), "exec", *flags, prompt),
        _environment(home, CODEX_HOME=str(home), POINTSMAN_API_KEY=server.key),
    )


def _opencode(home: Path, settings: str, *arguments: str) -> Start:
    (home / "opencode.json").write_text(settings)
    off = {
        f"OPENCODE_DISABLE_{what}": "1" for what in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    }
    variables = _environment(home, OPENCODE_CONFIG=str(home / "opencode.json"), **off)
    return Start((_in_package(OPENCODE.package) + "/bin/opencode", *arguments), variables)


def _opencode_run(home: Path, server: Server, prompt: str) -> Start:
    settings = server.in_settings("opencode.json").replace("{env:POINTSMAN_API_KEY}", server.key)
    return _opencode(home, settings, "run", "--format", "json", "--title", "a test", prompt)


def _cline(home: Path, server: Server, prompt: str) -> Start:
    settings = {"provider": "openai-compatible", "apiKey": server.key, "model": server.model}
    settings["baseUrl"] = f"{server.url}/v1"
    provider = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    file = home / ".cline/data/settings/providers.json"
    file.parent.mkdir(parents=True)
    known = {"version": 1, "lastUsedProvider": "openai-compatible", "modes": {}}
    file.write_text(json.dumps(known | {"providers": {"openai-compatible": provider}}))
    # Without this it leaves a daemon behind.
    variables = _environment(home, CLINE_SESSION_BACKEND_MODE="local", CLINE_NO_AUTO_UPDATE="1")
    return Start((_in_package(CLINE.package) + "/bin/cline", "--json", prompt), variables)


def _continue(home: Path, server: Server, prompt: str) -> Start:
    file = home / "config.yaml"
    file.write_text(server.in_settings("continue.yaml").replace("apiKey: none", f"apiKey: {server.key}"))
    off = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"}
    script = _in_package(CONTINUE.package) + "/dist/cn.js"
    command = (str(CLIENTS / "bin/node"), script, "--print", "--config", str(file), prompt)
    return Start(command, _environment(home, **off))


CLAUDE = Program(
    "Claude Code", "@anthropic-ai/claude-code-linux-x64", _claude, r'"terminal_reason":\s*"prompt_too_long"'
)
CODEX = Program("Codex", "@openai/codex-linux-x64", _codex, "ran out of room in the model's context window")
OPENCODE = Program("opencode", "opencode-linux-x64", _opencode_run, "ContextOverflowError")
CLINE = Program("cline", "@cline/cli-linux-x64", _cline, "ContextWindowOverflowError")
CONTINUE = Program("continue", "@continuedev/cli", _continue, "Context length exceeded")
PROGRAMS = (CLAUDE, CODEX, OPENCODE, CLINE, CONTINUE)


def _folders(folder: Path) -> tuple[Path, Path]:
    home, work = folder / "home", folder / "work"
    home.mkdir(parents=True)
    work.mkdir(exist_ok=True)
    return home, work


@asynccontextmanager
async def _running(start: Start, work: Path, printed: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command; at the end it and all that it has started is killed."""
    with printed.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *start.command,
            cwd=work,
            env=dict(start.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def run(
    program: Program, folder: Path, server: Server, prompt: str, *, within_s: float, enough: Callable[[], bool]
) -> Ended:
    """Give a program a prompt, in the folder `work` of `folder`; stop it once `enough`. Raises TimeoutError."""
    program.check()
    home, work = _folders(folder)
    printed = folder / "printed"
    start = program.start(home, server, prompt)
    async with asyncio.timeout(within_s), _running(start, work, printed) as process:
        while not enough():
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _LOOK_S)
                break
    status = process.returncode if (process.returncode or 0) >= 0 else None
    return Ended(status, printed.read_text(errors="replace"))


class OpencodeServer:
    """One process of opencode with a session for each prompt: it starts slowly."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def _call(self, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(self._url + path, json=body) as answer:
            return await answer.json()

    async def ask(self, name: str, model: str, prompt: str, *, enough: Callable[[], bool]) -> Ended:
        """Give it a prompt for the server `name`; stop it once `enough`."""
        id_ = (await self._call("/session", {"title": "a test"}))["id"]
        body = {"model": {"providerID": name, "modelID": model}, "parts": [{"type": "text", "text": prompt}]}
        asked = asyncio.ensure_future(self._call(f"/session/{id_}/message", body))
        try:
            while not enough():
                done, _ = await asyncio.wait([asked], timeout=_LOOK_S)
                if done:
                    failed = bool(asked.result()["info"].get("error"))
                    return Ended(int(failed), json.dumps(asked.result(), ensure_ascii=False))
            await self._call(f"/session/{id_}/abort", {})
            return Ended(None, "")
        finally:
            asked.cancel()
            with suppress(asyncio.CancelledError, aiohttp.ClientError):
                await asked


@asynccontextmanager
async def opencode_server(folder: Path, servers: Mapping[str, Server]) -> AsyncIterator[OpencodeServer]:
    """Run opencode with servers by name."""
    OPENCODE.check()
    home, work = _folders(folder)
    settings: dict[str, Any] = {}
    for name, server in servers.items():
        one = json.loads(server.in_settings("opencode.json").replace("{env:POINTSMAN_API_KEY}", server.key))
        (provider,) = one["provider"].values()
        settings = one | {"provider": settings.get("provider", {}) | {name: provider}}
        settings |= {"model": f"{name}/{server.model}", "small_model": f"{name}/{server.model}"}
    port = free_port()
    start = _opencode(home, json.dumps(settings), "serve", "--hostname", "127.0.0.1", "--port", str(port))
    printed = folder / "printed"
    async with _running(start, work, printed), aiohttp.ClientSession() as http:
        await eventually(lambda: "listening" in printed.read_text(errors="replace"))
        yield OpencodeServer(http, f"http://127.0.0.1:{port}")
