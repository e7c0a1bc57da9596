"""One question to a router from a command line: as an operator, and with a sentence where it cannot be asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import grpc
import typer

from pointsman.common.io.auth import bearer
from pointsman.common.io.channel import open_blocking_channel
from pointsman.common.io.settings import Tokens
from pointsman.router.v1 import fleet_pb2_grpc

DEFAULT_ROUTER = "127.0.0.1:50051"
UNUSABLE = 2  # The exit status of whoever gives settings that cannot be used, as typer's.

T = TypeVar("T")


def call(
    router: str,
    method: Callable[[fleet_pb2_grpc.FleetServiceStub], Callable[..., T]],
    request: object,
    timeout_s: float,
) -> T:
    """The answer to `request` of the method that `method` picks. Ends the program with 1 when there is none, and with 2 when the
    settings for TLS or tokens cannot be used."""
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
    """As `call`, and raises grpc.RpcError when there is no answer."""
    with dial(router) as channel:
        return method(fleet_pb2_grpc.FleetServiceStub(channel))(request, timeout=timeout_s, metadata=credentials())


def dial(router: str) -> grpc.Channel:
    """A channel to a router. Ends the program with 2 when the settings for TLS cannot be used."""
    try:
        return open_blocking_channel(router)
    except (ValueError, OSError) as error:
        fail(f"TLS to router {router}: {error}", UNUSABLE)


def credentials() -> tuple[tuple[str, str], ...]:
    """Metadata that shows the operator's token, or where there is none the observer's, which lets its bearer look; empty without
    either. Ends the program with 2 when a file of one cannot be read."""
    tokens = Tokens()
    for role in ("operator", "observer"):
        try:
            if token := tokens.of(role):
                return bearer(token)
        except (OSError, ValueError) as error:
            fail(f"the {role}'s token: {error}", UNUSABLE)
    return ()


def no_answer(router: str, error: grpc.RpcError) -> NoReturn:
    """End the program: the router does not answer."""
    fail(f"router {router}: {error.code().name}: {error.details()}")


def fail(message: str, status: int = 1) -> NoReturn:
    """End the program with a sentence."""
    typer.echo(f"pointsman: {message}", err=True)
    sys.exit(status)
