"""Ways in which an emulated engine can be ill, by order: what a fleet does about it can be watched on a laptop.

`POST /emulated_illness` with an Order as JSON makes the engine ill, `DELETE /emulated_illness` ends that, and `GET` tells of it:

- `hangs`: requests for answers are accepted and not answered; /health and /metrics are.
- `stands_still`: nothing is answered.
- `slow`: steps take `factor` times as long.
- `status`: every request for an answer gets `status`.
- `breaks`: every request for an answer has its connection broken.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from aiohttp import web

from pointsman_lab.emulator.engine_loop import EngineLoop
from pointsman_lab.emulator.http_routes import Handler
from pointsman_lab.emulator.openai_api import ApiError

PATH = "/emulated_illness"
# Paths of requests for answers begin so.
_ANSWERS = "/v1/"


class Order(msgspec.Struct, forbid_unknown_fields=True):
    """How an engine is to be ill, and for how many seconds (None: until it is ended)."""

    way: Literal["hangs", "stands_still", "slow", "status", "breaks"]
    for_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    factor: Annotated[float, msgspec.Meta(gt=0, le=1_000)] = 10.0


class Illness:
    """The illness of one engine, if it has one. Requests that wait go on when it ends."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._order: Order | None = None
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def add_to(self, app: web.Application) -> None:
        """Add the routes, and what ill engines do with requests, to an engine's application, which answers ApiError."""
        app.middlewares.append(self._answer)
        app.add_routes([web.post(PATH, self._begin), web.delete(PATH, self._end_by_order), web.get(PATH, self._tell)])

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        order = self._order
        if order is None or request.path == PATH:
            return await handler(request)
        if order.way == "stands_still":
            await self._ended.wait()
        elif request.path.startswith(_ANSWERS) and request.method == "POST":
            match order.way:
                case "hangs":
                    await self._ended.wait()
                case "status":
                    raise ApiError(order.status, "by order")
                case "breaks":
                    if request.transport is not None:
                        request.transport.abort()
                    return web.Response()
        return await handler(request)

    async def _begin(self, request: web.Request) -> web.Response:
        try:
            order = msgspec.json.decode(await request.read(), type=Order)
        except msgspec.DecodeError as error:
            return web.json_response({"error": str(error)}, status=400)
        self._end()
        self._order, self._ended = order, asyncio.Event()
        if order.way == "slow":
            self._loop.slowness = order.factor
        if order.for_s is not None:
            self._timer = asyncio.get_running_loop().call_later(order.for_s, self._end)
        return await self._tell(request)

    async def _end_by_order(self, request: web.Request) -> web.Response:
        self._end()
        return await self._tell(request)

    async def _tell(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._order), content_type="application/json")

    def _end(self) -> None:
        self._order = None
        self._loop.slowness = 1.0
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
