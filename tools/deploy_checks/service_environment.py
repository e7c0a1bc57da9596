"""Checks the environment of a container of the project's images against the settings class of the service that it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError
from pydantic_settings import BaseSettings

from pointsman_agent.io.settings import AgentSettings
from pointsman_common.io.settings import Tokens
from pointsman_common.io.tls import TlsSettings
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_lab.emulator.emulated_engine import EmulateSettings
from pointsman_router.io.settings import RouterSettings

# Subcommand of `pointsman` -> its settings class.
SETTINGS: dict[str, type[BaseSettings]] = {
    "router": RouterSettings,
    "agent": AgentSettings,
    "gateway": GatewaySettings,
    "emulate": EmulateSettings,
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


def check(service: ServiceEnvironment) -> list[str]:
    """Return the problems of a service's environment: a wrong image, unknown variables, invalid values, and missing files."""
    if (settings := SETTINGS.get(service.command)) is None:
        return [f"{service.where}: no settings for `pointsman {service.command}`"]
    if service.command != subcommand_of(service.image):
        return [f"{service.where}: the image {service.image} has not what `pointsman {service.command}` needs"]
    known = {
        str(cls.model_config["env_prefix"]) + name.upper()
        for cls in (settings, Tokens, TlsSettings)
        for name in cls.model_fields
    }
    problems = [
        f"{service.where}: `pointsman {service.command}` does not read {name}"
        for name in sorted({*service.env, *service.secret})
        if name.startswith("POINTSMAN_") and name not in known
    ]
    with _environment(service.env):
        try:
            settings()
        except (ValidationError, ValueError) as refused:
            problems += [f"{service.where}: {line}" for line in _lines(refused, settings)]
    folder = service.env.get(TOKEN_DIR, "")
    for role in TOKENS[service.command]:
        if f"{folder}/{role}" not in service.files:
            problems.append(f"{service.where}: no token file {role} is mounted in {TOKEN_DIR}={folder or '(not set)'}")
    for name, value in service.env.items():
        if name.startswith("POINTSMAN_") and name.endswith("_FILE") and value not in service.files:
            problems.append(f"{service.where}: {name}={value} is not mounted")
    return problems


def listens(service: ServiceEnvironment) -> Iterator[tuple[str, int]]:
    """Yield (variable, port) of every address of the network that the service listens on."""
    for name, value in service.env.items():
        if name.endswith("LISTEN") and value and not value.startswith("ipc:"):
            yield name, int(value.rpartition(":")[2])


def dialed_addresses(service: ServiceEnvironment) -> Iterator[tuple[str, str, int]]:
    """Yield (variable, host, port) of every address of another service in the environment, as the settings parse it; nothing if
    the settings are invalid."""
    settings = SETTINGS[service.command]
    with _environment(service.env):
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


def _environment(env: Mapping[str, str]) -> AbstractContextManager[Any]:
    """Within the context, the environment has the POINTSMAN_* variables of `env` and no others."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("POINTSMAN_")}
    ours = {name: value for name, value in env.items() if name.startswith("POINTSMAN_")}
    return mock.patch.dict(os.environ, others | ours, clear=True)
