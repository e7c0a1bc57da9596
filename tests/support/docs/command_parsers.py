"""Parses commands that cannot be run here: by typer, kubectl, the compose file, the Makefile and the list of benchmarks."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import typer.main
import yaml

from bench.gpu.command import make_parser as gpu_parser
from bench.named import BENCHMARKS, LONG
from pointsman_cli import main as command_line_module
from tests.support.repository import REPOSITORY
from tools import check_deploy, offline_install
from tools.deploy_checks.kubectl import ensure_helm, ensure_kubectl

COMPOSE = REPOSITORY / "deploy/compose"
# Subcommands of docker compose that the pages use. Tests have no Docker whose parser could check them.
COMPOSE_VERBS = {"build", "config", "exec", "logs", "ps", "restart", "up"}
HELM_VERBS = {"install", "upgrade"}
# Programs from elsewhere. Their arguments are not checked.
SHELL = {
    "cat",
    "cd",
    "cp",
    "curl",
    "docker",
    "export",
    "git",
    "jq",
    "kustomize",
    "mkdir",
    "openssl",
    "pip",
    "redis-server",
    "rm",
    "sleep",
}


def problem(command: str) -> str:
    """Return what is wrong with a command line, or "" if its program would accept it."""
    words = [word for word in shlex.split(command) if word not in ("|", "&")]
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if not words:
        return ""
    program, *arguments = words
    name = program.rpartition("/")[2]
    if program.startswith((".", "deploy/", "tools/")) and not _file(program):
        return f"there is no {program}"
    if words[:2] == ["docker", "compose"]:
        return _compose(words[2:])
    if name in _PARSERS:
        return _PARSERS[name](arguments)
    return "" if name in SHELL or _file(program) else f"unknown program {program}"


def _file(path: str) -> bool:
    return any((folder / path).exists() for folder in (REPOSITORY, COMPOSE, REPOSITORY / "deploy"))


@cache
def command_line() -> Any:
    """Return the click command of `pointsman`, with all its subcommands."""
    for register in dict.fromkeys(command.register for command in command_line_module.COMMANDS.values()):
        register()
    return typer.main.get_command(command_line_module.app)


def _pointsman(arguments: list[str]) -> str:
    command, rest = command_line(), arguments
    try:
        while hasattr(command, "commands") and rest and rest[0] in command.commands:
            command, rest = command.commands[rest[0]], rest[1:]
        if command is command_line():
            if any(arguments[0] in option.opts for option in command.params):
                return ""
            return f"pointsman has no command {' '.join(arguments[:1])!r}"
        command.make_context("pointsman", list(rest))
    except Exception as refused:
        return f"pointsman: {refused.__class__.__name__}: {refused}"
    return ""


def _kubectl(arguments: list[str]) -> str:
    if "--" in arguments and (said := problem(shlex.join(arguments[arguments.index("--") + 1 :]))):
        return said
    for folder in (after for flag, after in pairwise(arguments) if flag == "-k"):
        if not (REPOSITORY / folder).is_dir():
            return f"there is no {folder}"
    known = _object_names()
    for word in arguments:
        kind, slash, name = word.partition("/")
        if slash and kind in known and name not in known[kind] and not re.fullmatch(r"(vllm|router|gateway)-\d", name):
            return f"no {kind} is called {name}"
    # kubectl contacts the server, which does not exist, only after it has parsed all flags.
    asked = [*arguments, *(["--dry-run=server"] if arguments[0] == "apply" else [])]
    at = asked.index("--") if "--" in asked else len(asked)
    asked[at:at] = ["--server", "http://127.0.0.1:1", "--request-timeout", "1s"]
    done = subprocess.run([ensure_kubectl(), *asked], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    refused = ("127.0.0.1:1", "secrets/", "evalsymlink")
    return "" if done.returncode == 0 or any(word in done.stderr for word in refused) else done.stderr.strip()


@cache
def _object_names() -> dict[str, set[str]]:
    known: dict[str, set[str]] = {}
    for item in check_deploy.render(check_deploy.DEPLOY / "k8s/overlays/ha"):
        known.setdefault(item["kind"].lower(), set()).add(item["metadata"]["name"])
    return known


def _helm(arguments: list[str]) -> str:
    verb, *rest = arguments
    if verb not in HELM_VERBS:
        return f"helm {verb}: not in HELM_VERBS"
    # Without a cluster Helm renders what it would install. Files that the reader writes are left out.
    own = {index for index, (flag, file) in enumerate(pairwise(rest)) if flag == "-f" and not _file(file)}
    asked = [word for index, word in enumerate(rest) if index not in own and index - 1 not in own]
    done = subprocess.run(
        [ensure_helm(), "template", *asked], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return done.stderr.strip() if done.returncode else ""


def _compose(arguments: list[str]) -> str:
    services = set(yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"])
    words = iter(arguments)
    for word in words:
        if word == "-f" and not _file(file := next(words)):
            return f"there is no {file}"
        if not word.startswith("-") and word != "-f":
            verb, rest = word, [other for other in words if not other.startswith("-")]
            if verb not in COMPOSE_VERBS:
                return f"docker compose {verb}: not in COMPOSE_VERBS"
            named = rest[:1] if verb == "exec" else rest
            if unknown := set(named) - services:
                return f"no service is called {unknown.pop()}"
            return _pointsman(rest[2:]) if verb == "exec" and rest[1] == "pointsman" else ""
    return "docker compose without a subcommand"


def _make(arguments: list[str]) -> str:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    missing = {word for word in arguments if "=" not in word} - targets
    return f"make has no target {missing.pop()}" if missing else ""


def _python(arguments: list[str]) -> str:
    if arguments[:3] == ["-m", "bench", "gpu"]:
        return _argparse(gpu_parser(), arguments[3:])
    if arguments[0] == "parts/install.py":  # as `make gpu-wheels` copies it
        return _argparse(offline_install.make_parser(), arguments[1:])
    if arguments[:2] == ["-m", "bench"]:
        unknown = set(arguments[2:]) - set(BENCHMARKS | LONG)
        return f"no benchmark is called {unknown.pop()}" if unknown else ""
    if arguments[:1] == ["-m"]:
        path = arguments[1].replace(".", "/")
        return "" if _file(f"{path}.py") or _file(f"{path}/__main__.py") else f"there is no module {arguments[1]}"
    return f"python {' '.join(arguments)}?"


def _argparse(parser: argparse.ArgumentParser, arguments: list[str]) -> str:
    try:
        parser.parse_args(arguments)
    except SystemExit:
        return f"{parser.prog} {' '.join(arguments)}?"
    return ""


def _pytest(arguments: list[str]) -> str:
    missing = [word for word in arguments if "/" in word and not _file(word.partition("::")[0])]
    return f"there is no {missing[0]}" if missing else ""


def _vllm(arguments: list[str]) -> str:
    # tests/engine/test_deploy_flags.py checks its flags with vLLM's own parser.
    return "" if arguments[:1] == ["serve"] else f"vllm {' '.join(arguments)}?"


_PARSERS: dict[str, Callable[[list[str]], str]] = {
    "pointsman": _pointsman,
    "kubectl": _kubectl,
    "helm": _helm,
    "make": _make,
    "python": _python,
    "pytest": _pytest,
    "vllm": _vllm,
}
