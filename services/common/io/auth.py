"""Who may call what: bearer tokens with a role, checked on every gRPC method."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import functools
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from pointsman.common.io.proven_streams import ProvenStreams
from pointsman.common.io.reloading_file import ReloadingFile
from pointsman.common.io.settings import Tokens

ROLES = ("agent", "gateway", "operator", "observer")

# Methods whose full name begins so -> the roles that may call them. The first match counts; none means nobody.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("/grpc.health.v1.Health/", ("",)),
    ("/grpc.reflection.", ("",)),
    ("/pointsman.agent.v1.AgentService/", ("agent",)),
    ("/pointsman.router.v1.PlacementService/", ("gateway", "operator")),
    ("/pointsman.router.v1.FleetService/Drain", ("operator",)),
    ("/pointsman.router.v1.FleetService/SetInstanceOrder", ("operator",)),
    ("/pointsman.router.v1.FleetService/SetPolicy", ("operator",)),
    ("/pointsman.router.v1.FleetService/", ("gateway", "operator", "observer")),
)

# How long a refused stream waits for its caller's first message.
FIRST_MESSAGE_S = 5.0

# Begins the words of a file of bound tokens that name certificates.
CERTIFICATE = "cert="

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"
Metadata: TypeAlias = tuple[tuple[str, str], ...]
# What a caller shows with a call that begins now.
CallMetadata: TypeAlias = Callable[[], Metadata]


def may_call(method: str, role: str | None) -> bool:
    """Whether a caller with `role` (None: no valid token) may call `method`. Health and reflection are open to all."""
    for prefix, roles in RULES:
        if method.startswith(prefix):
            return "" in roles or role in roles
    return False


def role_of(tokens: Mapping[str, tuple[str, ...]], authorization: str) -> str | None:
    """The role one of whose `tokens` `authorization` ("Bearer ...") carries, or None, in a time that tells nothing of them."""
    scheme, _, presented = authorization.partition(" ")
    found = None
    for role, accepted in tokens.items():
        for token in accepted:
            if token and hmac.compare_digest(token.encode(), presented.encode()) and scheme.lower() == "bearer":
                found = role
    return found


@dataclass(frozen=True, slots=True)
class BoundToken:
    """A token of an agent or a gateway that is good for the ids that match one of `patterns` (shell style) only: those of
    instances, or of gateways; with `names`, only together with a client's certificate that has one of these names (shell style,
    too)."""

    token: str
    patterns: tuple[str, ...]
    names: tuple[str, ...] = ()

    def covers(self, name: str, shown: Sequence[str]) -> bool:
        """Whether who shows it, with a certificate that has the names `shown`, may speak for `name`."""
        return _matches([name], self.patterns) and (not self.names or _matches(shown, self.names))


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
                raise ValueError(f"{file}, line {number}: a token and the ids that it is good for are needed")
            bound.append(BoundToken(words[0], patterns, names))
    return tuple(bound)


def certificate_names(context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The names in the certificate that a peer has shown and that was checked (subject alternative names; without any the common
    name), from gRPC's auth context; none without one."""
    for kind in ("x509_subject_alternative_name", "x509_common_name"):
        if names := tuple(name.decode(errors="replace") for name in context.get(kind, ())):
            return names
    return ()


def credentials(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, tuple[str, ...]]:
    """What a caller has shown: its `authorization` ("Bearer ..."), empty for none, and its certificate's names."""
    authorization = str(dict(context.invocation_metadata() or ()).get("authorization", ""))
    return authorization, certificate_names(context.auth_context())


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the right role: UNAUTHENTICATED without a valid token, PERMISSION_DENIED with another role's. Ends
    streams (UNAUTHENTICATED) whose token is not valid any more."""

    def __init__(self, tokens: Tokens, bound: Mapping[str, Path] | None = None) -> None:
        """`bound`: by role, the file of its tokens that are good for some ids only, besides those for all of the role. All files
        are read again when they have changed. Raises OSError and ValueError for files that cannot be used."""
        self._tokens = {role: tokens.reader(role) for role in ROLES}
        self._bound = {
            role: ReloadingFile([file], functools.partial(read_bound_tokens, file))
            for role, file in (bound or {}).items()
        }
        # Once and for all: no change of a file lets everybody in.
        self.open = not self._bound and not any(reader.accepted for reader in self._tokens.values())
        """True when no token is configured, so that every caller passes."""
        self._streams = ProvenStreams(self._accepted)

    def role(self, authorization: str) -> str | None:
        """The role that `authorization` ("Bearer ...") proves; None without a valid token."""
        role = role_of({role: reader.accepted for role, reader in self._tokens.items()}, authorization)
        if role is None:
            role = next((one for one in self._bound if self._bound_of(one, authorization) is not None), None)
        return role

    def may_speak_for(self, role: str, authorization: str, names: Sequence[str], name: str) -> bool:
        """Whether who shows `authorization` and a certificate with `names` may, in `role`, use the id `name`: an agent an
        instance's, a gateway its own. Any, but for a bound token."""
        bound = self._bound_of(role, authorization)
        return bound is None or bound.covers(name, names)

    def while_allowed(self, authorization: str, method: str, end: Callable[[], object]) -> Callable[[], None]:
        """Call `end` once `authorization` does not allow `method`, a gRPC method's full name, any more; until what is returned is
        called, which must be done."""
        return self._streams.follow(self._still_may(authorization, method), end)

    def _still_may(self, authorization: str, method: str) -> Callable[[], bool]:
        return lambda: self.open or may_call(method, self.role(authorization))

    def _accepted(self) -> object:
        for file in self._bound.values():
            file.reload_if_changed()
        return (
            [reader.accepted for reader in self._tokens.values()],
            [file.value for file in self._bound.values()],
        )

    def _bound_of(self, role: str, authorization: str) -> BoundToken | None:
        if role not in self._bound:
            return None
        file, found = self._bound[role], None
        file.reload_if_changed()
        for one in file.value:
            if role_of({role: (one.token,)}, authorization) is not None:
                found = one
        return found

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        handler = await continuation(details)
        if self.open or handler is None:
            return handler
        metadata = dict(details.invocation_metadata or ())
        authorization = str(metadata.get("authorization", ""))
        role = self.role(authorization)
        if may_call(details.method, role):
            if handler.response_streaming and not may_call(details.method, None):
                return self._streams.handler(handler, self._still_may(authorization, details.method))
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


def bearer(token: str) -> Metadata:
    """Call metadata that shows `token`; empty when there is none."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def showing(tokens: Tokens, role: str) -> CallMetadata:
    """What a process that lives long shows as `role`, with each call the token that is in its file then. Raises OSError and
    ValueError when that cannot be used now."""
    reader = tokens.reader(role)
    return lambda: bearer(reader.shown)


def is_loopback(listen: str) -> bool:
    """Whether "HOST:PORT" listens on the loopback interface only."""
    host = listen.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
