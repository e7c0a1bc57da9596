"""docs/commands.md: every command with its arguments and options, as its `--help` has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from pointsman_cli.main import COMMANDS, app

# Commands whose settings docs/settings.md lists -> its heading.
SERVICES = {
    "up": "one-node",
    "router": "router",
    "gateway": "gateway",
    "agent": "agent",
    "serve": "router-and-gateway-in-one-process",
    "shadow serve": "shadow",
    "shadow read": "shadow-a-log",
}
INTRODUCTION = """\
# Commands

Made from the code by `python -m tools.made_pages`; a test compares this page with the code. An argument or option in brackets may
be left out. `pointsman COMMAND --help` prints the same in a terminal. `pointsman --install-completion` lets bash, zsh, fish and
PowerShell complete commands and options.
"""
_TREE = f"{Path(__file__).resolve().parent.parent}/"


def commands() -> str:
    """Return the content of docs/commands.md."""
    lines = [INTRODUCTION]
    panel = ""
    for name, listed in COMMANDS.items():
        if listed.panel and listed.panel != panel:
            panel = listed.panel
            lines += [f"## {panel}", ""]
        if listed.panel:
            lines += _described(name, _found(name))
    return "\n".join(lines)


def _found(name: str) -> Any:
    group = typer.main.get_command(app)
    return group.resolve_command(group.make_context("pointsman", [name]), [name])[1]  # type: ignore[attr-defined]


def _described(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of a command, or of a group and its commands."""
    inner = getattr(command, "commands", {})
    runs = not inner or command.invoke_without_command
    shown = [given for given in command.params if not given.hidden and given.name != "help"]
    yield from (f"### {name}", "")
    if runs:
        yield from (
            f"`{' '.join([f'pointsman {name}', *(_word(given) for given in shown if _is_argument(given))])}`",
            "",
        )
    yield from (_plain(command.help or ""), "")
    if name in SERVICES:
        yield from (f"Its options are [settings](settings.md#{SERVICES[name]}).", "")
    elif shown and runs:
        yield from map(_line, shown)
        yield ""
    for of_group, described in inner.items():
        yield from _described(f"{name} {of_group}", described)


def _is_argument(given: Any) -> bool:
    return bool(given.param_type_name == "argument")


def _word(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def _line(given: Any) -> str:
    name = _word(given) if _is_argument(given) else ", ".join([*given.opts, *given.secondary_opts])
    said = [_plain(given.help or "")]
    if given.envvar:
        said.append(f"variable `{given.envvar}`")
    if given.show_default and given.default not in (None, "", False, ()):
        said.append(f"default: {given.default}")
    return f"- `{name}`: {'; '.join(filter(None, said))}" if any(said) else f"- `{name}`"


def _plain(text: str) -> str:
    """Return a text of a command's help without escapes of rich's markup and paths of this checkout."""
    return text.replace("\\[", "[").replace(_TREE, "").strip()
