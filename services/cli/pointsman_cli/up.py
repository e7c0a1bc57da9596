"""`pointsman up`: an agent, a router and a gateway on one node, without Redis. Router and gateway share a process if they can."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import time
import urllib.error
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import typer
from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from pointsman_agent.core.engine_address import parse_engine_address
from pointsman_agent.io.settings import AgentSettings
from pointsman_cli.doctor import KV_EVENTS_FLAGS
from pointsman_cli.installed_policies import installed_policies
from pointsman_cli.local_engines import find_engines
from pointsman_cli.router_call import DEFAULT_ROUTER
from pointsman_common.core.addresses import address_of_url, parse_address
from pointsman_common.io.child_command import pointsman_child
from pointsman_common.io.direct_http import open_directly
from pointsman_common.io.listen_errors import reason_of
from pointsman_common.io.listening import bound_socket
from pointsman_common.io.settings import (
    EMPTY_PATH,
    Entries,
    HostPort,
    InvalidSetting,
    OptionalHostPort,
    by_name,
    empty_paths,
    holder_of,
    unreadable_field,
)
from pointsman_common.io.tls import TlsSettings
from pointsman_common.io.writable import make_writable
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_router.core.policy.registry import DEFAULT_POLICY
from pointsman_router.io.settings import RouterSettings

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Maximum time until the gateway answers, s.
START_TIMEOUT_S = 120.0
# Time after which it is told what is waited for, and maximum time until an engine is ready, s. Then the screen tells what is
# missing.
NOTICE_S, ENGINES_S = 3.0, 30.0
# Interval between two looks at the services, s, and timeout of an answer, s.
LOOK_S, ANSWER_S = 0.2, 2.0
# Time that a service has to end after the gateway's drain before it is killed, s.
STOP_SLACK_S = 5.0
# Signals within this time are one: `timeout`, for example, sends its own to the process and to its group.
SAME_SIGNAL_S = 0.2
# The variable of the part that each setting sets. It counts where neither the flag nor POINTSMAN_UP_* is given.
PARTS_OWN: Mapping[str, str] = {
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

    OTHER_VARIABLES: ClassVar[Mapping[str, str]] = PARTS_OWN  # field -> its part's variable, as errors name it

    engine: Entries = Field(
        default_factory=list,
        description="base URL of each vLLM server, with the agent's options (`?kv=mooncake`); default: those that answer on "
        "this host",
    )
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
    """Start the services, print one screen when they are ready, and stop them all when one ends or on SIGTERM or SIGINT. Blocks.
    Raises InvalidSetting."""
    if not settings.engine:
        settings = settings.model_copy(update={"engine": _found_engines(settings)})
    check(settings)
    if taken := unusable_addresses(settings):
        for problem in taken:
            typer.echo(f"pointsman up: {problem}", err=True)
        raise typer.Exit(1)
    settings = with_ports(settings)
    signals, children = Signals(), ChildProcesses()
    try:
        names, variables = services(settings, os.environ)
        for name in names:
            children.start(name, variables)
        fleet = LocalFleet(settings)
        if problem := wait_ready(fleet, children, signals):
            typer.echo(f"pointsman up: {problem}", err=True)
            raise typer.Exit(children.status or 1)
        if not signals.count:
            for line in screen(settings, fleet):
                typer.echo(line)
            _watch(fleet, children, signals)
        if (ended := children.ended()) is not None and not signals.count:
            typer.echo(f"pointsman up: {ended[0]} ended with status {ended[1]}", err=True)
            raise typer.Exit(ended[1] if ended[1] > 0 else 1)
        if signals.count:
            typer.echo(stopping_line(fleet.open_requests(), settings.drain_timeout_s))
    finally:
        children.stop(settings.drain_timeout_s + STOP_SLACK_S, signals)


def _found_engines(settings: UpSettings) -> list[str]:
    engines, asked = find_engines(_loopback_ports(settings))
    if not engines:
        said = (
            f"none of the {asked} ports that listen on this host is a vLLM server's"
            if asked
            else "no port listens on this host"
        )
        raise InvalidSetting(settings, "engine", f"{said}; give the URL of each vLLM server, as http://HOST:PORT")
    typer.echo(f"found on this host: {' '.join(engines)}")
    return engines


def check(settings: UpSettings) -> None:
    """Check all settings of the services, as they will read them. Raises InvalidSetting with what holds the value."""
    _, variables = services(settings, os.environ)
    own = {variable: name for name, variable in PARTS_OWN.items()}
    for kind in (AgentSettings, RouterSettings, GatewaySettings):
        prefix = str(kind.model_config["env_prefix"])
        for field in empty_paths(kind):
            raise _in_words_of_up(settings, kind, own, field, EMPTY_PATH)
        given: dict[str, Any] = {
            name.removeprefix(prefix).lower(): value for name, value in variables.items() if name.startswith(prefix)
        }
        try:
            part = kind(**given)
            if isinstance(part, RouterSettings):
                part.initial_policy(installed_policies())
        except ValidationError as invalid:
            error = invalid.errors(include_url=False, include_input=False)[0]
            field = str(error["loc"][0]) if error["loc"] else ""
            raise _in_words_of_up(settings, kind, own, field, error["msg"].removeprefix("Value error, ")) from None
        except SettingsError as unreadable:
            raise _in_words_of_up(settings, kind, own, unreadable_field(unreadable), "no JSON text") from None
        except InvalidSetting as invalid:
            raise _in_words_of_up(settings, kind, own, invalid.field, invalid.message) from None
    for model, place in by_name(settings.tokenizer).items():
        # Others are names of the hub.
        if place.startswith(("/", ".", "~")) and not os.access(Path(place) / "tokenizer.json", os.R_OK):
            raise InvalidSetting(settings, "tokenizer", f"{model}: {place} has no tokenizer.json that can be read")
    try:
        make_writable(settings.state_dir)
    except OSError as error:
        reason = f"{settings.state_dir} cannot be written: {error.strerror}"
        raise InvalidSetting(settings, "state_dir", reason) from None


def _in_words_of_up(
    settings: UpSettings, kind: type[BaseSettings], own: Mapping[str, str], field: str, message: str
) -> InvalidSetting:
    # The settings of a policy stand behind its name.
    variable = f"{kind.model_config['env_prefix']}{field.replace('policy_settings', 'policy').upper()}"
    if variable.endswith("_LOG_LEVEL"):
        return InvalidSetting(settings, "log_level", message)
    if variable in own:
        return InvalidSetting(settings, own[variable], message)
    return InvalidSetting(kind, field, message)


def _addresses(settings: UpSettings) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each address that is listened on."""
    for name in ("listen", "picker", "router_listen", "router_metrics", "console", "agent_metrics"):
        if address := getattr(settings, name):
            yield name, address


def _loopback_ports(settings: UpSettings) -> dict[int, str]:
    """Return the ports that are listened on at a loopback address, if only among others, each with the setting's name."""
    addresses = [(name, parse_address(address)) for name, address in _addresses(settings)]
    return {there.port: name for name, there in addresses if there.is_wildcard or there.host in _LOOPBACK}


def unusable_addresses(settings: UpSettings) -> list[str]:
    """Return one message, with what holds the address and the reason, for each address that cannot be listened on, and for each
    engine that has one of them.

    The addresses are checked before the start, because otherwise the services would use another process that listens at an
    address of one of them.
    """
    found, holders = [], dict[str, str]()
    for name, address in _addresses(settings):
        holder = holder_of(UpSettings, name)
        if (other := holders.setdefault(address, holder)) != holder and not address.endswith(":0"):
            found.append(f"{holder} {address}: {other} has the same address")
            continue
        try:
            bound_socket(parse_address(address)).close()
        except OSError as error:
            found.append(f"{holder} {address}: {reason_of(error)}")
    ports = _loopback_ports(settings)
    for url in (parse_engine_address(text).url for text in settings.engine):
        there = address_of_url(url)
        if there.host in _LOOPBACK and there.port in ports:
            other = holder_of(UpSettings, ports[there.port])
            found.append(f"{holder_of(UpSettings, 'engine')} {url}: {other} has the same address")
    return found


def with_ports(settings: UpSettings) -> UpSettings:
    """Return `settings` with a free port in the place of each port 0: the services, and `up` itself, must know each other's."""
    with ExitStack() as held:
        chosen = {}
        for name, text in _addresses(settings):
            address = parse_address(text)
            if not address.port:
                # Held until all are chosen, so that no port is chosen twice.
                free = held.enter_context(bound_socket(address))
                chosen[name] = str(address._replace(port=free.getsockname()[1]))
    return settings.model_copy(update=chosen)


def _reached(listen: str) -> str:
    """Return HOST:PORT at which this machine reaches what listens at HOST:PORT."""
    return str(parse_address(listen).to_connect)


class LocalFleet:
    """What the services of `up` tell of themselves over HTTP."""

    def __init__(self, settings: UpSettings) -> None:
        scheme = "https" if os.environ.get("POINTSMAN_GATEWAY_TLS_CERT") else "http"
        self.gateway_url = f"{scheme}://{_reached(settings.listen)}"
        self._agent_url = f"http://{_reached(settings.agent_metrics)}" if settings.agent_metrics else ""
        self._engines = settings.engine

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return the status (0: no answer) and the content of the gateway's /health."""
        status, body = _get(f"{self.gateway_url}/health")
        try:
            return status, json.loads(body) if body else {}
        except ValueError:
            return 0, {}

    def engines(self) -> list[dict[str, Any]]:
        """Return the engines as the agent's /health lists them; empty if it does not tell."""
        if not self._agent_url:
            return []
        try:
            return list(json.loads(_get(f"{self._agent_url}/health")[1] or b"{}").get("engines", []))
        except ValueError:
            return []

    def open_requests(self) -> int:
        """Return the number of requests that are placed and not finished."""
        page = _get(f"{self.gateway_url}/metrics")[1].decode(errors="replace")
        return sum(
            int(float(count)) for count in re.findall(r"^pointsman_gateway_open_requests(?:{.*})? (\S+)$", page, re.M)
        )


def _get(url: str) -> tuple[int, bytes]:
    # The gateway's certificate is for its clients' name of it.
    context = ssl._create_unverified_context() if url.startswith("https") else None
    try:
        with open_directly(url, ANSWER_S, context) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read(100_000)
    except OSError:
        return 0, b""


def engine_lines(engines: list[dict[str, Any]]) -> list[str]:
    """Return how many of the engines are ready, and a line for each that is not."""
    if not engines:
        return []
    ready = [engine for engine in engines if engine["healthy"]]
    others = [f"{engine['engine']}: {engine['problem']}" for engine in engines if not engine["healthy"]]
    return [f"{len(ready)} of {len(engines)} ready", *others]


def screen(settings: UpSettings, fleet: LocalFleet) -> Iterator[str]:
    """Yield what is printed when the services run: addresses, engines, policy, and what is missing, with its flag."""
    status, health = fleet.health()
    engines = fleet.engines()
    everywhere = "   (on all interfaces)" if parse_address(settings.listen).is_wildcard else ""
    refuses = "" if status == 200 else "   (answers 503 until an engine is ready)"
    yield f"OpenAI API   {fleet.gateway_url}/v1{everywhere}{refuses}"
    if settings.picker:
        yield f"picker       {settings.picker}   (for an Envoy: docs/gateway-api.md)"
    router = _reached(settings.router_listen)
    given = "" if router == DEFAULT_ROUTER else f" with --router {router}"
    yield f"router gRPC  {router}   (pointsman instances, decisions, explain{given})"
    if settings.console:
        yield f"console      {'https' if TlsSettings().cert else 'http'}://{_reached(settings.console)}"
    for number, line in enumerate(engine_lines(engines)):
        yield f"{'' if number else 'engines':13}{line}"
    models: dict[str, Any] = health.get("models", {})
    if models:
        yield f"models       {', '.join(sorted(models))}"
    yield f"policy       {settings.policy}"
    for instance in (instance for engine in engines for instance in engine["instances"]):
        if reason := instance["prefix_reason"]:
            yield f"missing      KV events of {instance['instance_id']}: {reason}"
            yield f"             vllm serve {KV_EVENTS_FLAGS}"
    for model, state in sorted(models.items()):
        if not state["exact"]:
            yield f"missing      the tokenizer of {model}: {state['reason']}"
            yield f"             --tokenizer {model}=FOLDER"


def stopping_line(open_requests: int, drain_timeout_s: float) -> str:
    """Return what is printed at the first signal."""
    if not open_requests:
        return "stopping"
    requests = "1 open request" if open_requests == 1 else f"{open_requests} open requests"
    return f"stopping: waiting up to {drain_timeout_s:.0f} s for {requests}; Ctrl-C again does not wait"


def services(settings: UpSettings, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the commands to run, in their order of start, and the variables that they get besides `environment`.

    Several gateway processes cannot share a router's process, so that the gateway is a service of its own then.
    """
    variables = {variable: _text(getattr(settings, name)) for name, variable in PARTS_OWN.items()}
    variables["POINTSMAN_AGENT_ROUTERS"] = variables["POINTSMAN_GATEWAY_ROUTERS"] = _reached(settings.router_listen)
    given = "log_level" in settings.model_fields_set
    variables |= {level: settings.log_level for level in LOG_LEVELS if given or level not in environment}
    several = environment.get("POINTSMAN_GATEWAY_PROCESSES", "1") != "1"
    return ["agent", "router", "gateway"] if several else ["agent", "serve"], variables


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


class Signals:
    """Counts SIGINT, SIGTERM and, unless `nohup` has it ignored, SIGHUP. They do nothing else from then on."""

    def __init__(self) -> None:
        self.count = 0
        self._last = 0.0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._received)

    def _received(self, *_: object) -> None:
        now = time.monotonic()
        if not self.count or now - self._last > SAME_SIGNAL_S:
            self.count, self._last = self.count + 1, now


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

    @property
    def status(self) -> int:
        """Status of a child that has ended; 0 if all run, or if a signal ended it."""
        ended = self.ended()
        return max(ended[1], 0) if ended is not None else 0

    def stop(self, timeout_s: float, signals: Signals) -> None:
        """Stop all children in reverse order: the gateway first, so that streams drain while the agent still runs. After a
        further signal a child gets SIGTERM again and again, by which a gateway ends its requests, and has STOP_SLACK_S. A child
        that has not ended in time is killed, at once after one signal more."""
        before = signals.count
        for name, process in reversed(self._running.items()):
            until = time.monotonic() + timeout_s
            hurried = False
            if process.poll() is None:
                process.terminate()
            while process.poll() is None:
                if signals.count > before and not hurried:
                    hurried, until = True, min(until, time.monotonic() + STOP_SLACK_S)
                if time.monotonic() > until or signals.count > before + 1:
                    typer.echo(f"pointsman up: {name} did not stop in time; killing it", err=True)
                    process.kill()
                    process.wait()
                elif hurried:
                    process.terminate()
                time.sleep(LOOK_S)


def wait_ready(fleet: LocalFleet, children: ChildProcesses, signals: Signals) -> str:
    """Wait until the gateway is ready, or has been without an engine for ENGINES_S, or a signal arrives. Return "" then, or the
    problem if a child ends or the gateway does not answer."""
    began, answered_at, noticed = time.monotonic(), 0.0, False
    while not signals.count:
        if (ended := children.ended()) is not None:
            return f"{ended[0]} ended with status {ended[1]}"
        status, health = fleet.health()
        now = time.monotonic()
        if status == 200:
            return ""
        if not status and now - began > START_TIMEOUT_S:
            return f"the gateway did not answer within {START_TIMEOUT_S:.0f} s"
        answered_at = answered_at or (now if status else 0.0)
        if answered_at and now - answered_at > NOTICE_S and not noticed:
            noticed = True
            lines = engine_lines(fleet.engines()) or health.get("missing", [])
            typer.echo(f"waiting for engines: {'; '.join(lines)}")
        if answered_at and now - answered_at > ENGINES_S:
            return ""
        time.sleep(LOOK_S)
    return ""


def _watch(fleet: LocalFleet, children: ChildProcesses, signals: Signals) -> None:
    """Wait until a child ends or a signal arrives. Prints when all engines are ready for the first time, unless they are now."""
    complete = all(engine["healthy"] for engine in fleet.engines())
    looked_at = time.monotonic()
    while children.ended() is None and not signals.count:
        time.sleep(LOOK_S)
        if not complete and time.monotonic() - looked_at > ANSWER_S:
            looked_at = time.monotonic()
            engines = fleet.engines()
            if complete := bool(engines) and all(engine["healthy"] for engine in engines):
                typer.echo(f"engines      {engine_lines(engines)[0]}")
