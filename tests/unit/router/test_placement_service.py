"""A gateway's stream that ends, as grpc tells it: the last read returns, and the call is cancelled around the same time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_common.io.channel import END_OF_STREAM
from pointsman_router.core.gateway_claims import GatewayClaims
from pointsman_router.io.rpc.placement_service import PlacementService
from tests.support.router import gateway_hello


class Router:
    """What a session asks of a router."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace(router_id="r1")
        self.store = SimpleNamespace(epoch=1)
        self.gateway_claims = GatewayClaims(15.0)
        self.calls: list[str] = []

    def opened(self, hello: Any, stream: Any) -> None:
        self.calls.append(f"{hello.gateway_id} opened")

    def closed(self, gateway_id: str, stream: Any) -> None:
        self.calls.append(f"{gateway_id} closed")


class Context:
    """A call whose peer sends a hello and disconnects. The call is cancelled after `turns` turns of the event loop."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._read = False

    async def read(self) -> Any:
        if not self._read:
            self._read = True
            return placement_pb2.SessionRequest(hello=gateway_hello("gw-1"))
        await asyncio.sleep(0)
        return END_OF_STREAM

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return "ipv4:10.0.0.1:4711"

    async def write(self, message: Any) -> None:
        await asyncio.sleep(0)

    async def play(self, session: asyncio.Task[None]) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        session.cancel()


@pytest.mark.parametrize("turns", range(2, 14))
def test_a_gateway_that_is_gone_is_lost_whenever_its_call_is_cancelled(turns: int) -> None:
    async def play() -> list[str]:
        router: Any = Router()
        context: Any = Context(turns)
        service = PlacementService(router, lambda *_: True)
        session = asyncio.ensure_future(service.Session(None, context))
        await asyncio.gather(context.play(session), session, return_exceptions=True)
        calls: list[str] = router.calls
        return calls

    calls = asyncio.run(play())
    assert calls in ([], ["gw-1 opened", "gw-1 closed"]), "opened and never closed"


class Slow(Context):
    """A call whose welcome is written after its claim has expired. `other`: another gateway has opened under the id by then."""

    def __init__(self, claims: GatewayClaims, other: bool) -> None:
        super().__init__(0)
        self._claims, self._other = claims, other
        self.aborted = False

    async def write(self, message: Any) -> None:
        later = time.monotonic() + 20.0
        self._claims.expire(later)
        if self._other:
            assert self._claims.opened("gw-1", b"another" * 4, later)

    async def abort_with_status(self, status: Any) -> None:
        self.aborted = True
        raise RuntimeError


@pytest.mark.parametrize("other", [False, True])
def test_a_session_that_is_long_in_opening_claims_its_id_anew(other: bool) -> None:
    async def play() -> tuple[list[str], bool]:
        router: Any = Router()
        context: Any = Slow(router.gateway_claims, other)
        session = PlacementService(router, lambda *_: True).Session(None, context)
        await asyncio.gather(session, return_exceptions=True)
        return router.calls, context.aborted

    calls = [] if other else ["gw-1 opened", "gw-1 closed"]
    assert asyncio.run(play()) == (calls, other)
