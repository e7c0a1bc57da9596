"""The console: a web page, and FleetService as JSON over HTTP for that page, with the same tokens and roles as over gRPC.

`POST /api/METHOD` receives and returns FleetService's messages in protobuf's JSON mapping. `GET /api/decisions` streams decisions
as server-sent events. Long responses are built in small parts, because placements share the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeAlias
from urllib.parse import urlsplit

import grpc
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from pointsman.router.v1 import fleet_pb2
from pointsman_common.core.addresses import Address, parse_address
from pointsman_common.io.auth import TokenInterceptor, is_loopback, may_call
from pointsman_router.io.console.decision_stream import DecisionStream
from pointsman_router.io.console.json_text import json_chunks
from pointsman_router.io.rpc.fleet_service import FleetService
from pointsman_router.io.rpc.paged_lists import in_turns

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
SERVICE = fleet_pb2.DESCRIPTOR.services_by_name["FleetService"]
WATCH = f"/{SERVICE.full_name}/WatchDecisions"
# Maximum size of a request body. A policy's settings have some hundred bytes.
MAX_BODY_BYTES = 64 * 1024
# Time without a decision after which a comment is sent to a viewer, s. So both sides notice when the connection is broken.
KEEP_ALIVE_S = 5.0
# Maximum number of concurrent streams of decisions.
MAX_VIEWERS = 16

HEADERS = {
    # Allow only this origin's files: no inline scripts or styles, and no text that is parsed as markup.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
}

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CallRefused(Exception):
    """Raised to answer a call with an error: a gRPC status `code`, and a `message` for the user."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class _Call:
    """The part of a gRPC context that FleetService uses."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise CallRefused(code, details)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        raise CallRefused(status.code, status.details)


class Console:
    """The HTTP server of one router's FleetService. `listen`: HOST:PORT. `tls`: the context for HTTPS; None: HTTP."""

    def __init__(
        self,
        fleet: FleetService,
        decisions: DecisionStream,
        auth: TokenInterceptor,
        listen: str,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._fleet = fleet
        self.decisions = decisions
        self._auth = auth
        self._listen = listen
        self._tls = tls
        self._local = is_loopback(listen)
        self._methods: dict[str, MethodDescriptor] = {
            method.name: method for method in SERVICE.methods if not method.server_streaming
        }
        self._one_at_a_time = asyncio.Lock()
        self._streams: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None
        self.scheme = "https" if tls else "http"
        self.port = 0
        self.address = ""

    async def start(self) -> None:
        """Start the server. Raises OSError if the address is in use."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        for path, file in _files():
            app.router.add_get(path, _static(file))
        app.router.add_get("/api/role", self._role)
        app.router.add_get("/api/decisions", self._watch)
        app.router.add_post("/api/{method}", self._call)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        address = parse_address(self._listen)
        await web.TCPSite(self._runner, *address.to_listen, ssl_context=self._tls).start()
        self.port = self._runner.addresses[0][1]
        self.address = f"{self.scheme}://{Address(address.host, self.port)}"

    async def stop(self) -> None:
        """End the viewers' streams and stop the server."""
        for stream in self._streams:
            stream.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: refuse requests from other sites' pages, return errors as JSON, and add HEADERS to each response."""
        try:
            self._refuse_other_sites(request)
            response = await handler(request)
        except CallRefused as refused:
            response = web.json_response(
                {"code": refused.code.name, "message": refused.message}, status=HTTP_STATUS.get(refused.code, 500)
            )
        except web.HTTPException as other:
            response = web.json_response({"code": "HTTP", "message": other.reason}, status=other.status)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _refuse_other_sites(self, request: web.Request) -> None:
        # Browsers send a request's origin. Without tokens, only this check keeps other sites' pages from draining the fleet.
        if request.path.startswith("/api/") and request.headers.get("Sec-Fetch-Site", "none") not in (
            "same-origin",
            "none",
        ):
            raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, "requests from other sites are refused")
        # With DNS rebinding, another site's name points to this address, and its page's requests are same-origin.
        if self._auth.open and self._local and not _names_loopback(request.host):
            raise CallRefused(
                grpc.StatusCode.PERMISSION_DENIED, "without tokens, only requests to a loopback name are answered"
            )

    def _check(self, request: web.Request, method: str) -> None:
        """Raise CallRefused, with TokenInterceptor's codes, unless the caller may call `method`, a gRPC method's full name."""
        if self._auth.open:
            return
        role = self._auth.role(request.headers.get("Authorization", ""))
        if may_call(method, role):
            return
        if role is None:
            raise CallRefused(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is needed")
        raise CallRefused(grpc.StatusCode.PERMISSION_DENIED, f"role {role} may not call {method}")

    async def _role(self, request: web.Request) -> web.Response:
        """Return the caller's role ("" without a valid token), and whether the caller may read and operate."""
        role = "operator" if self._auth.open else self._auth.role(request.headers.get("Authorization", ""))
        may = {
            name: self._auth.open or may_call(f"/{SERVICE.full_name}/{method}", role)
            for name, method in (("read", "ListInstances"), ("operate", "Drain"))
        }
        return web.json_response({"role": role or "", "open": self._auth.open, **may})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        method = self._methods.get(request.match_info["method"])
        if method is None:
            raise CallRefused(grpc.StatusCode.NOT_FOUND, "no such method")
        self._check(request, f"/{SERVICE.full_name}/{method.name}")
        if request.content_type != "application/json":
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, "Content-Type: application/json is required")
        asked = GetMessageClass(method.input_type)()
        try:
            json_format.Parse(await request.text() or "{}", asked)
        except (json_format.ParseError, UnicodeDecodeError, LookupError) as error:  # LookupError: an unknown charset
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        async with self._one_at_a_time:
            answer = await getattr(self._fleet, method.name)(asked, _Call())
            text = "".join([chunk async for chunk in in_turns(json_chunks(answer))])
        return web.Response(text=text, content_type="application/json")

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self._check(request, WATCH)
        if (connection := request.transport) is None:
            return web.Response()  # The viewer has disconnected.
        if len(self._streams) >= MAX_VIEWERS:
            raise CallRefused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_VIEWERS} viewers are connected already, which is the maximum",
            )
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        viewer = self.decisions.join(connection.abort)
        let_go = self._auth.while_allowed(request.headers.get("Authorization", ""), WATCH, task.cancel)
        try:
            await response.prepare(request)
            while not viewer.dropped:
                await response.write((await viewer.next(KEEP_ALIVE_S)).encode())
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            let_go()
            self.decisions.leave(viewer)
            self._streams.discard(task)
        return response


def _files() -> Iterator[tuple[str, Path]]:
    yield "/", PAGE / "index.html"
    for file in sorted(PAGE.iterdir()):
        if file.suffix in TYPES and file.name != "index.html":
            yield f"/{file.name}", file


def _static(file: Path) -> Handler:
    body = file.read_bytes()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=TYPES[file.suffix], charset="utf-8")

    return answer


def _names_loopback(host: str) -> bool:
    """Return whether a Host header names this machine's loopback interface."""
    with contextlib.suppress(ValueError):  # brackets that do not belong together, or a name
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    return False
