"""Who may call what: bearer tokens with a role, checked on every gRPC method."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from pointsman.common.io.settings import Tokens

ROLES = ("agent", "gateway", "operator", "observer")

# Methods whose full name begins so -> the roles that may call them. The first match counts; none means nobody.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("/grpc.health.v1.Health/", ("",)),
    ("/grpc.reflection.", ("",)),
    ("/pointsman.agent.v1.AgentService/", ("agent",)),
    ("/pointsman.router.v1.PlacementService/", ("gateway", "operator")),
    ("/pointsman.router.v1.FleetService/Drain", ("operator",)),
    ("/pointsman.router.v1.FleetService/SetPolicy", ("operator",)),
    ("/pointsman.router.v1.FleetService/", ("gateway", "operator", "observer")),
)

# How long a refused stream waits for its caller's first message.
FIRST_MESSAGE_S = 5.0

# Begins the words of an agents file that name certificates.
CERTIFICATE = "cert="

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"


def may_call(method: str, role: str | None) -> bool:
    """Whether a caller with `role` (None: no valid token) may call `method`. Health and reflection are open to all."""
    for prefix, roles in RULES:
        if method.startswith(prefix):
            return "" in roles or role in roles
    return False


def role_of(tokens: Mapping[str, str], authorization: str) -> str | None:
    """The role whose token `authorization` ("Bearer ...") carries, or None, in a time that tells nothing of the token."""
    scheme, _, presented = authorization.partition(" ")
    found = None
    for role, token in tokens.items():
        if token and hmac.compare_digest(token.encode(), presented.encode()) and scheme.lower() == "bearer":
            found = role
    return found


@dataclass(frozen=True, slots=True)
class BoundToken:
    """An agent's token that is good for the instances whose ids match one of `patterns` (shell style) only; with `names`, only
    together with a client's certificate that has one of these names (shell style, too)."""

    token: str
    patterns: tuple[str, ...]
    names: tuple[str, ...] = ()

    def covers(self, instance_id: str, shown: Sequence[str]) -> bool:
        """Whether its agent, whose certificate has the names `shown`, may report this instance."""
        return _matches([instance_id], self.patterns) and (not self.names or _matches(shown, self.names))


def _matches(texts: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(text, pattern) for text in texts for pattern in patterns)


def read_bound_tokens(file: Path) -> tuple[BoundToken, ...]:
    """Lines `TOKEN PATTERN [PATTERN ...] [cert=NAME ...]`, # begins a comment. Raises OSError, and ValueError that names the line
    only."""
    bound = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if words := line.partition("#")[0].split():
            names = tuple(word.removeprefix(CERTIFICATE) for word in words[1:] if word.startswith(CERTIFICATE))
            patterns = tuple(word for word in words[1:] if not word.startswith(CERTIFICATE))
            if not patterns or not all(names):
                raise ValueError(f"{file}, line {number}: a token and the instances that it is good for are needed")
            bound.append(BoundToken(words[0], patterns, names))
    return tuple(bound)


def certificate_names(context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The names in the certificate that a peer has shown and that was checked (subject alternative names; without any the common
    name), from gRPC's auth context; none without one."""
    for kind in ("x509_subject_alternative_name", "x509_common_name"):
        if names := tuple(name.decode(errors="replace") for name in context.get(kind, ())):
            return names
    return ()


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the right role: UNAUTHENTICATED without a valid token, PERMISSION_DENIED with another role's."""

    def __init__(self, tokens: Tokens, bound: Sequence[BoundToken] = ()) -> None:
        """`bound`: tokens of agents besides the one for all of them."""
        self._tokens = {role: token for role in ROLES if (token := tokens.of(role))}
        self._bound = tuple(bound)

    @property
    def open(self) -> bool:
        """True when no token is configured, so that every caller passes."""
        return not self._tokens and not self._bound

    def role(self, authorization: str) -> str | None:
        """The role that `authorization` ("Bearer ...") proves; None without a valid token."""
        role = role_of(self._tokens, authorization)
        return "agent" if role is None and self._bound_of(authorization) is not None else role

    def may_report(self, authorization: str, names: Sequence[str], instance_id: str) -> bool:
        """Whether an agent that shows `authorization` and a certificate with `names` may report this instance: any, but for a
        bound token."""
        bound = self._bound_of(authorization)
        return bound is None or bound.covers(instance_id, names)

    def _bound_of(self, authorization: str) -> BoundToken | None:
        found = None
        for one in self._bound:
            if role_of({"agent": one.token}, authorization) is not None:
                found = one
        return found

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        handler = await continuation(details)
        if self.open or handler is None:
            return handler
        metadata = dict(details.invocation_metadata or ())
        role = self.role(str(metadata.get("authorization", "")))
        if may_call(details.method, role):
            return handler
        if role is None:
            return _refusing(handler, grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is needed")
        return _refusing(handler, grpc.StatusCode.PERMISSION_DENIED, f"role {role} may not call {details.method}")


def _refusing(handler: Handler, code: grpc.StatusCode, message: str) -> Handler:
    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if handler.request_streaming:
            # A client of grpc.aio whose first write fails because its call is over reports INTERNAL in place of this answer
            # (https://github.com/grpc/grpc/issues/36066).
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_MESSAGE_S):
                    await context.read()
        await context.abort(code, message)

    if handler.request_streaming and handler.response_streaming:
        make = grpc.stream_stream_rpc_method_handler
    elif handler.request_streaming:
        make = grpc.stream_unary_rpc_method_handler
    elif handler.response_streaming:
        make = grpc.unary_stream_rpc_method_handler
    else:
        make = grpc.unary_unary_rpc_method_handler
    # Without a deserializer: nothing of a refused caller's is parsed.
    return make(refuse, None, handler.response_serializer)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that shows `token`; empty when there is none."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def is_loopback(listen: str) -> bool:
    """Whether "HOST:PORT" listens on the loopback interface only."""
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
