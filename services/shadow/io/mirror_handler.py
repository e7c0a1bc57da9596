"""The HTTP handler for mirrored requests: each is answered 204 at once, and nothing is asked of an engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from pointsman.common.io.metrics_page import metrics_page
from pointsman.gateway.core.http_message import Headers, Request, Response
from pointsman.shadow.io.metrics import ShadowMetrics

# What is kept of a request's head; a client's keys are not.
KEPT = ("X-Request-ID", "X-Session-ID")
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class MirroredRequest:
    """A request as it came, at unix s."""

    path: str
    headers: Headers
    body: bytes
    at: float


class Backlog:
    """Mirrored requests until they are understood, so many bytes at most: what comes beyond them is dropped and counted."""

    def __init__(self, max_bytes: int, telemetry: ShadowMetrics) -> None:
        self._max_bytes = max_bytes
        self._telemetry = telemetry
        self._waiting: deque[MirroredRequest] = deque()
        self._bytes = 0
        self._came = asyncio.Event()
        self._reading: MirroredRequest | None = None

    def put(self, one: MirroredRequest) -> None:
        """A request came. Mutates."""
        if self._bytes + len(one.body) > self._max_bytes:
            self._telemetry.excluded.labels("backlog").inc()
            return
        self._bytes += len(one.body)
        self._waiting.append(one)
        self._came.set()

    async def get(self) -> MirroredRequest:
        """The oldest; it counts as unread until the next one is asked for. Mutates."""
        self._reading = None
        while not self._waiting:
            self._came.clear()
            await self._came.wait()
        self._reading = one = self._waiting.popleft()
        self._bytes -= len(one.body)
        return one

    @property
    def read_until(self) -> float:
        """Everything that came before this moment (unix s) has been read."""
        oldest = self._reading or (self._waiting[0] if self._waiting else None)
        return oldest.at if oldest is not None else time.time()


class MirrorHandler:
    """The site that a shadow's HTTP server serves."""

    def __init__(self, backlog: Backlog, telemetry: ShadowMetrics, summary: Callable[[], dict[str, Any]]) -> None:
        self._backlog = backlog
        self._telemetry = telemetry
        self._summary = summary

    def admit(self, request: Request) -> Response | None:
        """Nobody is refused: a mirror's answers are read by none."""
        return None

    async def answer(self, request: Request) -> Response | None:
        """204 to a mirrored request; /metrics, /report and /health."""
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
        """What never became a request."""
        self._telemetry.excluded.labels("invalid").inc()
        return Response(status, msgspec.json.encode({"error": {"message": message, "code": code}}), JSON)
