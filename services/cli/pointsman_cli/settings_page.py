"""`pointsman settings`: a page with all settings of all services (docs/settings.md), generated from the settings classes."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from pointsman_agent.io.settings import AgentSettings
from pointsman_cli import fleet_commands
from pointsman_cli.one_process_settings import OneProcessSettings
from pointsman_cli.router_call import DEFAULT_ROUTER
from pointsman_cli.up import UpSettings
from pointsman_common.io.settings import ARGUMENT, Tokens
from pointsman_common.io.tls import TlsSettings
from pointsman_gateway.io.api_keys import KeysFromEnvironment
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_router.io.settings import RouterSettings
from pointsman_shadow.io.settings import ReadSettings, ServeSettings

# What of a longer description follows a colon stands under the table, characters.
CELL = 240
INTRODUCTION = """\
# Settings

Generated from the code by `pointsman settings`; a test compares this page with the code. A flag overrides its environment
variable, which overrides the default. A list has entries with blanks between them; the flag of a list may be given several times.
An invalid value ends the program with status 2, and the message names the flag or variable. Times are in seconds. Tokens,
passwords and keys have no flag, or should be given without one, because all users of a machine can see flags. The commands of
the lab (`simulate`, `compare`, `emulate`, ...) describe their settings with `--help`; their variables are
`POINTSMAN_COMMAND_NAME`.
"""

ENGINES = """\
## In an engine's environment

| variable | what it is |
| --- | --- |
| `POINTSMAN_AGENT_LOADS` | ZMQ address that the connector package pushes the load of steps to: an agent's `step_loads_listen` |
| `POINTSMAN_ENGINE_RUN` | id of the engine's run; the connector package sets it for the engine's other processes. Do not set it |
"""


def settings() -> None:
    """Print all settings of all services, with flags, variables and defaults, as a Markdown page."""
    typer.echo(page(), nl=False)


def page() -> str:
    """Return the content of docs/settings.md."""
    parts = [INTRODUCTION]
    parts += _section("Router", "`pointsman router`.", RouterSettings, flags=True)
    parts += _section("Agent", "`pointsman agent`, one on every node with engines.", AgentSettings, flags=True)
    parts += _section("Gateway", "`pointsman gateway`.", GatewaySettings, flags=True)
    parts += _section("Gateway: keys of clients", "In addition to `api_keys_file`.", KeysFromEnvironment, flags=False)
    parts += _section(
        "Router and gateway in one process",
        "`pointsman serve`; both also read their own variables, but for the gateway's `routers`.",
        OneProcessSettings,
        flags=True,
    )
    parts += _section(
        "One node",
        "`pointsman up`; its services also read their own variables, but for agents' and gateways' `routers`.\n"
        "What is given here comes first, then the service's variable (`POINTSMAN_ROUTER_POLICY` for `policy`), then the default.",
        UpSettings,
        flags=True,
    )
    parts += _section("Shadow", "`pointsman shadow serve`.", ServeSettings, flags=True)
    parts += _section("Shadow: a log", "`pointsman shadow read`.", ReadSettings, flags=True)
    parts += _section("Tokens", "Router, agent, gateway and operators' commands.", Tokens, flags=False)
    parts += _section(
        "TLS between services", "Router, agent, gateway and operators' commands.", TlsSettings, flags=False
    )
    parts += ["## Operators' commands\n", *_operators(), ENGINES]
    return "\n".join(parts)


def _section(title: str, where: str, kind: type[BaseSettings], *, flags: bool) -> list[str]:
    prefix = kind.model_config["env_prefix"]
    head = ["name", *(["flag"] if flags else []), "variable", "default", "allowed", "what it is"]
    lines = [f"## {title}\n", f"{where}\n", _row(head), _row(["---"] * len(head))]
    below: list[str] = []
    for name, field in kind.model_fields.items():
        flag = [f"`{_flag(name, field)}`"] if flags else []
        text = field.description or ""
        if len(text) > CELL:
            text, _, rest = text.partition(": ")
            text += " (more below)"
            below += ["", textwrap.fill(f"`{name}`: {rest}.", 150, break_on_hyphens=False)]
        cells = [f"`{prefix}{name.upper()}`", _default(field), _allowed(field), _escaped(text)]
        lines.append(_row([f"`{name}`", *flag, *cells]))
    return [*lines, *below, ""]


def _operators() -> Iterator[str]:
    """Yield the table of environment variables that the operators' commands read."""
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    group = typer.main.get_command(app)
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        for parameter in command.params:
            if parameter.envvar:
                default = parameter.default or (DEFAULT_ROUTER if parameter.name == "router" else "")
                found.setdefault((parameter.envvar, parameter.opts[0], default), []).append(f"`{name}`")
    yield _row(["variable", "flag", "default", "read by"])
    yield _row(["---"] * 4)
    for (variable, flag, default), commands in sorted(found.items()):
        yield _row([f"`{variable}`", f"`{flag}`", f"`{default}`" if default else "", ", ".join(commands)])
    yield _row([f"`{fleet_commands.API_KEY}`", "", "", "`explain` with a prompt: a client's key for the gateway"])
    yield ""


def _flag(name: str, field: FieldInfo) -> str:
    if field.json_schema_extra == ARGUMENT:
        return name.upper()
    words = name.replace("_", "-")
    return f"--{words}, --no-{words}" if field.annotation is bool else f"--{words}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value, again = (field.get_default(call_default_factory=True) for _ in range(2))
    if value != again:
        return "made at start"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value in ("", [], {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`" if abs(value) < 1e5 else f"`{value:,.0f}`"
    return f"`{' '.join(map(str, value)) if isinstance(value, list) else value}`"


def _allowed(field: FieldInfo) -> str:
    """Return a number's bounds, the permitted words, or the kind of value; "" if the kind needs no description."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return ", ".join(f"`{argument}`" for argument in get_args(kind))
    said = []
    for bound in field.metadata:
        match bound:
            case annotated_types.Ge(low):
                said.append(f"{low:g} or more")
            case annotated_types.Gt(low):
                said.append(f"over {low:g}")
            case annotated_types.Le(high):
                said.append(f"at most {high:g}")
            case annotated_types.Lt(high):
                said.append(f"under {high:g}")
            case annotated_types.MinLen(count):
                said.append(f"{count} or more")
            case _ if pattern := getattr(bound, "pattern", None):
                said.append(", ".join(f"`{word}`" for word in pattern.strip("^$()").split("|")))
    return " and ".join(said) or _kind(kind)


def _kind(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(argument for argument in get_args(kind) if argument is not type(None))
    names = {bool: "true or false", Path: "a path", SecretStr: "a secret", list: "a list", dict: "a JSON object"}
    return names.get(get_origin(kind) or kind, "")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
