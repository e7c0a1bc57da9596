"""Checks the environment of a container of the project's images against the settings class of the service that it runs."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError
from pydantic_settings import BaseSettings

# Subcommand of `pointsman` -> module of its settings class.
MODULES = {
    "router": "pointsman_router.io.settings",
    "agent": "pointsman_agent.io.settings",
    "gateway": "pointsman_gateway.io.settings",
    "emulate": "pointsman_lab.emulator.emulated_engine",
}
# Subcommand -> the token files that it needs in POINTSMAN_TOKEN_DIR.
TOKENS = {
    "router": ("agent", "gateway", "operator", "observer"),
    "agent": ("agent",),
    "gateway": ("gateway",),
    "emulate": (),
}
TOKEN_DIR = "POINTSMAN_TOKEN_DIR"
# Image -> the subcommand whose packages the image has.
IMAGES = {
    "pointsman-router": "router",
    "pointsman-agent": "agent",
    "pointsman-gateway": "gateway",
    "pointsman-lab": "emulate",
}
# Settings that contain addresses of other services.
DIALED_SETTINGS = ("routers", "engines", "redis_url")


@dataclass(frozen=True)
class ServiceEnvironment:
    """A container of a service: its subcommand, its image, its environment and the files mounted into it, by absolute path."""

    where: str
    command: str
    image: str
    env: Mapping[str, str]
    files: frozenset[str] = field(default_factory=frozenset)
    # Variables whose values are set at run time, as from a secret; only their names are known.
    secret: frozenset[str] = field(default_factory=frozenset)


def subcommand_of(image: str) -> str:
    """Return the subcommand that one of the project's images is for, "" for other images."""
    return IMAGES.get(image.rpartition("/")[2].partition(":")[0], "")


def settings_of(command: str) -> type[BaseSettings]:
    """Return the settings class of a subcommand. Raises LookupError with the reason if there is none."""
    try:
        module = importlib.import_module(MODULES[command])
    except (KeyError, ImportError) as error:
        raise LookupError(f"no settings for `pointsman {command}`: {error}") from None
    prefix = f"POINTSMAN_{command.upper()}_"
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, BaseSettings) and value.model_config["env_prefix"] == prefix:
            return value
    raise LookupError(f"{MODULES[command]} has no settings class with the prefix {prefix}")


def check(told: ServiceEnvironment) -> list[str]:
    """Return the problems of a service's environment: a wrong image, unknown variables, invalid values, and missing files."""
    try:
        settings = settings_of(told.command)
    except LookupError as error:
        return [f"{told.where}: {error}"]
    if told.command != subcommand_of(told.image):
        return [f"{told.where}: the image {told.image} has not what `pointsman {told.command}` needs"]
    tokens = importlib.import_module("pointsman_common.io.settings").Tokens
    tls = importlib.import_module("pointsman_common.io.tls").TlsSettings
    known = {
        str(cls.model_config["env_prefix"]) + name.upper()
        for cls in (settings, tokens, tls)
        for name in cls.model_fields
    }
    problems = [
        f"{told.where}: `pointsman {told.command}` does not read {name}"
        for name in sorted({*told.env, *told.secret})
        if name.startswith("POINTSMAN_") and name not in known
    ]
    with _environment(told.env):
        try:
            settings()
        except (ValidationError, ValueError) as refused:
            problems += [f"{told.where}: {line}" for line in _lines(refused, settings)]
    folder = told.env.get(TOKEN_DIR, "")
    for role in TOKENS[told.command]:
        if f"{folder}/{role}" not in told.files:
            problems.append(f"{told.where}: no token file {role} is mounted in {TOKEN_DIR}={folder or '(not set)'}")
    for name, value in told.env.items():
        if name.startswith("POINTSMAN_") and name.endswith("_FILE") and value not in told.files:
            problems.append(f"{told.where}: {name}={value} is not mounted")
    return problems


def listens(told: ServiceEnvironment) -> Iterator[tuple[str, int]]:
    """Yield (variable, port) of every address of the network that the service listens on."""
    for name, value in told.env.items():
        if name.endswith("LISTEN") and value and not value.startswith("ipc:"):
            yield name, int(value.rpartition(":")[2])


def dialed_addresses(told: ServiceEnvironment) -> Iterator[tuple[str, str, int]]:
    """Yield (variable, host, port) of every address of another service in the environment, as the settings parse it; nothing if
    the settings are invalid."""
    settings = settings_of(told.command)
    with _environment(told.env):
        try:
            loaded = settings()
        except (ValidationError, ValueError):
            return  # check() reports the error.
    for name in DIALED_SETTINGS:
        value = getattr(loaded, name, None)
        for address in value if isinstance(value, list) else []:
            variable = str(settings.model_config["env_prefix"]) + name.upper()
            url = urlsplit(address if "://" in address else f"//{address}")
            yield from ((variable, host, port) for host, port in _addresses(url.geturl()))


def _addresses(address: str) -> Iterator[tuple[str, int]]:
    url = urlsplit(address)
    if url.scheme != "ipc" and url.hostname and url.port:
        yield url.hostname, url.port
    for values in parse_qs(url.query).values():
        for value in values:
            if "://" in value:
                yield from _addresses(value)


def _lines(refused: Exception, settings: type[BaseSettings]) -> list[str]:
    if not isinstance(refused, ValidationError):
        return [" ".join(str(refused).split())]
    prefix = str(settings.model_config["env_prefix"])
    return [
        f"{prefix}{'_'.join(map(str, error['loc'])).upper()}: {error['msg']}"
        for error in refused.errors(include_url=False, include_input=False)
    ]


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = {name: value for name, value in os.environ.items() if re.match("POINTSMAN_", name)}
    for name in before:
        del os.environ[name]
    os.environ.update({name: value for name, value in env.items() if name.startswith("POINTSMAN_")})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("POINTSMAN_")]:
            del os.environ[name]
        os.environ.update(before)
