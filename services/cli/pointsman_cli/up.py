"""`pointsman up`: an agent, a router and a gateway on one node, without Redis. Router and gateway share a process if they can."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import typer
from pydantic import Field
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from pointsman_common.core.addresses import parse_address
from pointsman_common.io.child_command import pointsman_child
from pointsman_common.io.listening import bound_socket
from pointsman_common.io.settings import Entries, HostPort, OptionalHostPort
from pointsman_common.io.tls import TlsSettings
from pointsman_router.core.policy.registry import DEFAULT_POLICY

# Maximum time until the gateway is ready, s.
READY_TIMEOUT_S = 120.0
# Time that a service has to end after the gateway's drain before it is killed, s.
STOP_SLACK_S = 5.0
# The variable of the part that each setting sets. It counts where neither the flag nor POINTSMAN_UP_* is given.
PARTS_OWN = {
    "engine": "POINTSMAN_AGENT_ENGINES",
    "listen": "POINTSMAN_GATEWAY_LISTEN",
    "picker": "POINTSMAN_GATEWAY_EXT_PROC_LISTEN",
    "router_listen": "POINTSMAN_ROUTER_LISTEN",
    "router_metrics": "POINTSMAN_ROUTER_METRICS_LISTEN",
    "console": "POINTSMAN_ROUTER_CONSOLE_LISTEN",
    "agent_metrics": "POINTSMAN_AGENT_METRICS_LISTEN",
    "policy": "POINTSMAN_ROUTER_POLICY",
    "tokenizer": "POINTSMAN_GATEWAY_TOKENIZERS",
    "state_dir": "POINTSMAN_AGENT_STATE_DIR",
    "drain_timeout_s": "POINTSMAN_GATEWAY_DRAIN_TIMEOUT_S",
}
# What `log_level` sets. Each part has its own.
LOG_LEVELS = tuple(f"POINTSMAN_{part}_LOG_LEVEL" for part in ("AGENT", "ROUTER", "GATEWAY", "SERVE"))


class UpSettings(BaseSettings):
    """Settings of `pointsman up`, from flags, POINTSMAN_UP_* variables or the parts' own (PARTS_OWN), in this order. All other
    settings are set with the parts' own variables."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_UP_")

    engine: Entries = Field(min_length=1, description="base URL of each vLLM server")
    listen: HostPort = Field("127.0.0.1:8080", description="HOST:PORT of the gateway")
    picker: OptionalHostPort = Field(
        "", description="HOST:PORT at which the gateway is an Envoy's endpoint picker; empty: none"
    )
    router_listen: HostPort = Field("127.0.0.1:50051", description="HOST:PORT of the router's gRPC services")
    router_metrics: OptionalHostPort = Field(
        "127.0.0.1:9100", description="HOST:PORT of the router's /metrics; empty: none"
    )
    console: OptionalHostPort = Field("127.0.0.1:9102", description="HOST:PORT of the router's console; empty: none")
    agent_metrics: OptionalHostPort = Field(
        "127.0.0.1:9101", description="HOST:PORT of the agent's /metrics; empty: none"
    )
    policy: str = Field(DEFAULT_POLICY, description="policy at start: NAME or NAME:SETTING=VALUE,...")
    tokenizer: Entries = Field(
        default_factory=list, description="MODEL=FOLDER of a tokenizer; default: the engine's own, if readable here"
    )
    state_dir: Path = Field(
        Path(".state/agent"), description="folder for the agent's saved state; must persist over restarts"
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="maximum time that open requests have to end when the gateway stops, in s"
    )
    log_level: str = Field("warning", description="debug, info, warning or error")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources by precedence: flags, POINTSMAN_UP_* variables, the parts' own variables."""
        own = {name: os.environ[variable] for name, variable in PARTS_OWN.items() if variable in os.environ}
        return init_settings, env_settings, InitSettingsSource(settings_cls, own)


def run_up(settings: UpSettings) -> None:
    """Start the services, print when they are ready, and stop them all when one ends or on SIGTERM or SIGINT. Blocks."""
    if taken := unusable_addresses(settings):
        for problem in taken:
            typer.echo(f"pointsman up: {problem}", err=True)
        raise typer.Exit(1)
    children = ChildProcesses()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        names, variables = services(settings, os.environ)
        for name in names:
            children.start(name, variables)
        base = f"http://{settings.listen}"
        missing = wait_ready(f"{base}/health", children)
        if missing:
            typer.echo(f"pointsman up: {missing}", err=True)
            raise typer.Exit(1)
        typer.echo(f"OpenAI API   {base}/v1")
        if settings.picker:
            typer.echo(f"picker       {settings.picker}   (for an Envoy: docs/gateway-api.md)")
        typer.echo(f"router gRPC  {settings.router_listen}   (pointsman instances, decisions, explain)")
        if settings.console:
            typer.echo(f"console      {'https' if TlsSettings().cert else 'http'}://{settings.console}")
        name, status = children.wait()
        typer.echo(f"pointsman up: {name} ended with status {status}", err=True)
        raise typer.Exit(status or 1)
    except KeyboardInterrupt:
        typer.echo("stopping")
    finally:
        # A second SIGTERM, which `timeout` sends, would end this process before its children.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        children.stop(settings.drain_timeout_s + STOP_SLACK_S)


def unusable_addresses(settings: UpSettings) -> list[str]:
    """Return one message, with flag and reason, for each address that cannot be listened on.

    The addresses are checked before the start, because otherwise the services would use another process that listens at an
    address of one of them.
    """
    found = []
    for name in ("listen", "picker", "router_listen", "router_metrics", "console", "agent_metrics"):
        if address := getattr(settings, name):
            try:
                bound_socket(parse_address(address)).close()
            except OSError as error:
                reason = "another process listens there" if getattr(error, "errno", 0) == errno.EADDRINUSE else error
                found.append(f"--{name.replace('_', '-')} {address}: {reason}")
    return found


def services(settings: UpSettings, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the commands to run, in their order of start, and the variables that they get besides `environment`.

    Several gateway processes cannot share a router's process, so that the gateway is a service of its own then.
    """
    variables = {variable: _text(getattr(settings, name)) for name, variable in PARTS_OWN.items()}
    variables["POINTSMAN_AGENT_ROUTERS"] = variables["POINTSMAN_GATEWAY_ROUTERS"] = settings.router_listen
    given = "log_level" in settings.model_fields_set
    variables |= {level: settings.log_level for level in LOG_LEVELS if given or level not in environment}
    several = environment.get("POINTSMAN_GATEWAY_PROCESSES", "1") != "1"
    return ["agent", "router", "gateway"] if several else ["agent", "serve"], variables


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


class ChildProcesses:
    """Child processes that are stopped together."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, variables: Mapping[str, str]) -> None:
        """Start `pointsman NAME` with `variables` in its environment."""
        # A separate process group: a terminal's Ctrl-C must reach only the parent, which stops the children in order.
        self._running[name] = subprocess.Popen(pointsman_child(name), process_group=0, env=os.environ | variables)

    def ended(self) -> tuple[str, int] | None:
        """Return a child that has ended, with its status; None if all run."""
        for name, process in self._running.items():
            if (status := process.poll()) is not None:
                return name, status
        return None

    def wait(self) -> tuple[str, int]:
        """Block until a child ends; return its name and status."""
        while (ended := self.ended()) is None:
            time.sleep(0.2)
        return ended

    def stop(self, timeout_s: float) -> None:
        """Stop all children in reverse order: the gateway first, so that streams drain while the agent still runs. A child that
        has not ended `timeout_s` after its SIGTERM is killed."""
        for name, process in reversed(self._running.items()):
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                typer.echo(f"pointsman up: {name} did not stop in time; killing it", err=True)
                process.kill()
                process.wait()


def wait_ready(url: str, children: ChildProcesses) -> str:
    """Poll a health URL until it answers 200. Return "" then, or the problem if a child ends or READY_TIMEOUT_S passes."""
    until = time.monotonic() + READY_TIMEOUT_S
    last = "no answer"
    while time.monotonic() < until:
        if (ended := children.ended()) is not None:
            return f"{ended[0]} ended with status {ended[1]}"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return ""
        except urllib.error.HTTPError as answer:
            last = answer.read(2_000).decode(errors="replace")
        except OSError as error:
            last = str(error)
        time.sleep(0.2)
    return f"not ready after {READY_TIMEOUT_S:.0f} s: {last}"
