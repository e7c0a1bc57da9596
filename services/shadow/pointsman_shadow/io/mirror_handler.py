"""HTTP handler for mirrored requests. It answers each with 204 at once and sends nothing to an engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from pointsman_common.io.metrics_page import metrics_page
from pointsman_gateway.core.http_message import Headers, Request, Response
from pointsman_gateway.core.request.agent_headers import HEADERS
from pointsman_shadow.io.metrics import ShadowMetrics

# Headers kept of a request. A client's API key is not kept.
KEPT = ("X-Request-ID", *HEADERS)
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class MirroredRequest:
    """A mirrored request as received; `at` is its arrival in unix s."""

    path: str
    headers: Headers
    body: bytes
    at: float


class Backlog:
    """Queue of mirrored requests that are not read yet. Requests beyond `max_bytes` of bodies are dropped and counted."""

    def __init__(self, max_bytes: int, telemetry: ShadowMetrics) -> None:
        self._max_bytes = max_bytes
        self._telemetry = telemetry
        self._waiting: deque[MirroredRequest] = deque()
        self._bytes = 0
        self._came = asyncio.Event()
        self._reading: MirroredRequest | None = None

    def put(self, request: MirroredRequest) -> None:
        """Add a request, or drop and count it if the queue is full. Mutates."""
        if self._bytes + len(request.body) > self._max_bytes:
            self._telemetry.excluded.labels("backlog").inc()
            return
        self._bytes += len(request.body)
        self._waiting.append(request)
        self._came.set()

    async def get(self) -> MirroredRequest:
        """Wait for and remove the oldest request. It counts as unread until the next call. Mutates."""
        self._reading = None
        while not self._waiting:
            self._came.clear()
            await self._came.wait()
        self._reading = request = self._waiting.popleft()
        self._bytes -= len(request.body)
        return request

    @property
    def read_until(self) -> float:
        """Time up to which all requests have been read, unix s."""
        oldest = self._reading or (self._waiting[0] if self._waiting else None)
        return oldest.at if oldest is not None else time.time()


class MirrorHandler:
    """Handler of a shadow's HTTP server."""

    def __init__(self, backlog: Backlog, telemetry: ShadowMetrics, summary: Callable[[], dict[str, Any]]) -> None:
        self._backlog = backlog
        self._telemetry = telemetry
        self._summary = summary

    def admit(self, request: Request) -> Response | None:
        """Refuse no request, because a mirroring router ignores the answers."""
        return None

    async def answer(self, request: Request) -> Response | None:
        """Answer /metrics, /report and /health; queue a mirrored request and answer 204."""
        if request.method in ("GET", "HEAD"):
            match request.path:
                case "/metrics":
                    return Response(
                        200, await metrics_page(self._telemetry.registry), {"Content-Type": CONTENT_TYPE_LATEST}
                    )
                case "/report":
                    return Response(200, msgspec.json.encode(self._summary()), JSON)
                case "/health":
                    return Response(200, b"{}", JSON)
        kept = Headers((name, request.headers[name]) for name in KEPT if name in request.headers)
        if request.method == "POST":
            self._backlog.put(MirroredRequest(request.path, kept, request.body, time.time()))
        return Response(204)

    def error(self, status: int, message: str, code: str, path: str) -> Response:
        """Answer and count input that is not a valid HTTP request."""
        self._telemetry.excluded.labels("invalid").inc()
        return Response(status, msgspec.json.encode({"error": {"message": message, "code": code}}), JSON)
