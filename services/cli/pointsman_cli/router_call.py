"""Calls of a router from the command line, with the operator's token and with errors as one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

import grpc
import typer

from pointsman.router.v1 import fleet_pb2_grpc
from pointsman_common.core.printable import printable
from pointsman_common.io import router_target
from pointsman_common.io.auth import bearer
from pointsman_common.io.channel import open_blocking_channel
from pointsman_common.io.router_failures import NOTHING_LISTENS, meaning
from pointsman_common.io.settings import Tokens, sendable
from pointsman_router.io.convert.times import MAX_DURATION_S

DEFAULT_ROUTER = "127.0.0.1:50051"
UNUSABLE = 2  # Exit status for settings that cannot be used; typer uses the same.

T = TypeVar("T")


def call(
    router: str,
    method: Callable[[fleet_pb2_grpc.FleetServiceStub], Callable[..., T]],
    request: object,
    timeout_s: float,
) -> T:
    """Call the method that `method` selects from a stub, and return its answer. Ends the program with status 1 if there is no
    answer, and with status 2 if the settings for TLS or tokens cannot be used."""
    try:
        return ask(router, method, request, timeout_s)
    except grpc.RpcError as error:
        no_answer(router, error)


def ask(
    router: str,
    method: Callable[[fleet_pb2_grpc.FleetServiceStub], Callable[..., T]],
    request: object,
    timeout_s: float,
) -> T:
    """The same as `call`, but raises grpc.RpcError if there is no answer."""
    with dial(router) as channel:
        return method(fleet_pb2_grpc.FleetServiceStub(channel))(request, timeout=timeout_s, metadata=credentials())


def dial(router: str) -> grpc.Channel:
    """Open a channel to a router. Ends the program with status 2 if the settings for TLS cannot be used."""
    try:
        return open_blocking_channel(router)
    except (ValueError, OSError) as error:
        fail(f"TLS to router {router}: {error}", UNUSABLE)


def credentials() -> tuple[tuple[str, str], ...]:
    """Return metadata with the operator's token, else with the observer's, which permits only queries; empty without either. Ends
    the program with status 2 if a token's file cannot be read."""
    for role in ("operator", "observer"):
        try:
            if token := Tokens.from_environment().of(role):
                return bearer(token)
        except (OSError, ValueError) as error:
            fail(f"the {role}'s token: {error}", UNUSABLE)
    return ()


def no_answer(router: str, error: grpc.RpcError) -> NoReturn:
    """End the program with status 1 and a gRPC error as one sentence, with what to do if there is no router."""
    said = sentence(error)
    remedy = ": start it, or name another one with --router HOST:PORT" if said.endswith(NOTHING_LISTENS) else ""
    fail(f"router {router} {said}{remedy}")


def sentence(error: grpc.RpcError) -> str:
    """Return what a gRPC error says of a router, as the end of a sentence that begins with its address."""
    return meaning(error.code(), error.details() or "", "operator", "observer")


def router_of(text: str) -> str:
    """Return the target of the router that a flag names (pointsman_common.io.router_target). Raises BadParameter."""
    try:
        return router_target.router_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def url_of(text: str) -> str:
    """Return a base URL from what a user gives: a URL, as clients have it with /v1, too, or HOST:PORT. Raises BadParameter."""
    url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or True)
    except ValueError:  # a port that is none, or brackets without an IPv6 address
        usable = False
    if not usable or " " in url or not (url.isascii() and url.isprintable()):
        raise typer.BadParameter(f"{printable(text)}: HOST:PORT, or an http or https URL, is needed")
    return url


def key_of(name: str, text: str) -> str:
    """Return a key for a header from the text of the variable or flag `name`. Ends the program with status 2 if no header can
    have it."""
    try:
        return sendable(text)
    except ValueError:
        fail(f"{name}: a key has printable ASCII only", UNUSABLE)


def seconds_of(given: float | None) -> float | None:
    """Return the seconds that a flag gives, at most what a message can have: 10,000 years. Raises BadParameter for a negative
    number and for NaN, which typer's bounds let through."""
    if given is not None and not given >= 0:
        raise typer.BadParameter(f"{given:g}: a number of seconds, 0 or more, is needed")
    return given if given is None else min(given, MAX_DURATION_S)


def fail(message: str, status: int = 1) -> NoReturn:
    """Print `message` on stderr and end the program with `status`."""
    typer.echo(f"pointsman: {message}", err=True)
    sys.exit(status)
