"""Authorization of gRPC calls: bearer tokens prove a role, and every method lists the roles that may call it."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import functools
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from pointsman_common.core.addresses import parse_address
from pointsman_common.io.proven_streams import ProvenStreams
from pointsman_common.io.reloading_file import ReloadingFile
from pointsman_common.io.settings import Tokens

ROLES = ("agent", "gateway", "operator", "observer")

# Prefix of a method's full name -> roles that may call the method; "" stands for every caller. The first match counts; a
# method that matches no rule is closed to all.
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

# Timeout for the first message of a stream that will be refused, s.
FIRST_MESSAGE_S = 5.0

# Prefix of the words in a file of bound tokens that name certificates.
CERTIFICATE = "cert="
# The bracket before an IPv6 address in a pattern.
_IPV6 = re.compile(r"\[(?=[0-9a-fA-F:.*?]*:[0-9a-fA-F:.*?]*\](:|$))")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"
Metadata: TypeAlias = tuple[tuple[str, str], ...]
# Returns the metadata for a call that starts now.
CallMetadata: TypeAlias = Callable[[], Metadata]


def may_call(method: str, role: str | None) -> bool:
    """Return whether a caller with `role` (None: no valid token) may call `method`. Health and reflection are open to all."""
    for prefix, roles in RULES:
        if method.startswith(prefix):
            return "" in roles or role in roles
    return False


def role_of(tokens: Mapping[str, tuple[str, ...]], authorization: str) -> str | None:
    """Return the role whose token is in `authorization` ("Bearer ..."), or None. Tokens are compared in constant time."""
    scheme, _, presented = authorization.partition(" ")
    found = None
    for role, accepted in tokens.items():
        for token in accepted:
            if token and hmac.compare_digest(token.encode(), presented.encode()) and scheme.lower() == "bearer":
                found = role
    return found


@dataclass(frozen=True, slots=True)
class BoundToken:
    """A token of an agent or a gateway that is valid only for some ids of instances or of gateways.

    A valid id matches one of `patterns` (shell style). If `names` is not empty, the token is valid only with a client
    certificate that has a name which matches one of `names` (shell style).
    """

    token: str
    patterns: tuple[str, ...]
    names: tuple[str, ...] = ()

    def covers(self, name: str, shown: Sequence[str]) -> bool:
        """Return whether a caller with this token, and a certificate with the names `shown`, may use the id `name`."""
        return _matches([name], self.patterns) and (not self.names or _matches(shown, self.names))


def _matches(texts: Sequence[str], patterns: Sequence[str]) -> bool:
    # The brackets of an IPv6 address are no set of characters.
    literal = [_IPV6.sub("[[]", pattern) for pattern in patterns]
    return any(fnmatch.fnmatchcase(text, pattern) for text in texts for pattern in literal)


def read_bound_tokens(file: Path) -> tuple[BoundToken, ...]:
    """Read lines `TOKEN PATTERN [PATTERN ...] [cert=NAME ...]`; # begins a comment. Raises OSError, and ValueError with the
    number of the line but not its text."""
    bound = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if words := line.partition("#")[0].split():
            names = tuple(word.removeprefix(CERTIFICATE) for word in words[1:] if word.startswith(CERTIFICATE))
            patterns = tuple(word for word in words[1:] if not word.startswith(CERTIFICATE))
            if not patterns or not all(names):
                raise ValueError(f"{file}, line {number}: a token and the ids that it is valid for are needed")
            bound.append(BoundToken(words[0], patterns, names))
    return tuple(bound)


def certificate_names(context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names in a peer's verified certificate, from gRPC's auth context; empty without a certificate.

    The names are the subject alternative names or, if there are none, the common name.
    """
    for kind in ("x509_subject_alternative_name", "x509_common_name"):
        if names := tuple(name.decode(errors="replace") for name in context.get(kind, ())):
            return names
    return ()


def credentials(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, tuple[str, ...]]:
    """Return a caller's `authorization` ("Bearer ...", empty if missing) and the names in its certificate."""
    authorization = str(dict(context.invocation_metadata() or ()).get("authorization", ""))
    return authorization, certificate_names(context.auth_context())


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a role that may make them: UNAUTHENTICATED without a valid token, PERMISSION_DENIED for a wrong role.

    Ends a stream with UNAUTHENTICATED when its token is no longer valid.
    """

    def __init__(self, tokens: Tokens, bound: Mapping[str, Path] | None = None) -> None:
        """`bound`: role -> file of tokens that are valid for some ids only, in addition to the tokens of the whole role.

        Files are read again when they change. Raises OSError and ValueError for files that cannot be used.
        """
        self._tokens = {role: tokens.reader(role) for role in ROLES}
        self._bound = {
            role: ReloadingFile([file], functools.partial(read_bound_tokens, file))
            for role, file in (bound or {}).items()
        }
        # Fixed at start, so that no later change of a file opens the server to everybody.
        self.open = not self._bound and not any(reader.accepted for reader in self._tokens.values())
        """True if no token is configured: every caller is accepted."""
        self._streams = ProvenStreams(self._accepted)

    def role(self, authorization: str) -> str | None:
        """Return the role that `authorization` ("Bearer ...") proves; None without a valid token."""
        role = role_of({role: reader.accepted for role, reader in self._tokens.items()}, authorization)
        if role is None:
            role = next((name for name in self._bound if self._bound_of(name, authorization) is not None), None)
        return role

    def may_speak_for(self, role: str, authorization: str, names: Sequence[str], name: str) -> bool:
        """Return whether a caller with `authorization` and a certificate with `names` may use the id `name` in `role`.

        An agent uses ids of instances, a gateway its own id. Only bound tokens restrict the ids.
        """
        bound = self._bound_of(role, authorization)
        return bound is None or bound.covers(name, names)

    def while_allowed(self, authorization: str, method: str, end: Callable[[], object]) -> Callable[[], None]:
        """Call `end` when `authorization` no longer allows `method` (a gRPC method's full name).

        Return a function that stops the watch; the caller must call it.
        """
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
        for bound in file.value:
            if role_of({role: (bound.token,)}, authorization) is not None:
                found = bound
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
            # If the call ends before the first write of a grpc.aio client, the client reports INTERNAL instead of this status
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
    # No deserializer: messages of a refused caller are not parsed.
    return make(refuse, None, handler.response_serializer)


def bearer(token: str) -> Metadata:
    """Return call metadata that carries `token`; empty if there is no token."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def showing(tokens: Tokens, role: str) -> CallMetadata:
    """Return a function that returns the call metadata of `role`, each time with the token that is in the file then.

    Raises OSError and ValueError if the file cannot be used now.
    """
    reader = tokens.reader(role)
    return lambda: bearer(reader.shown)


def is_loopback(listen: str) -> bool:
    """Return whether "HOST:PORT" is an address of the loopback interface."""
    host = parse_address(listen).host
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
