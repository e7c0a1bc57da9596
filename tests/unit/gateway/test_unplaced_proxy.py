"""Requests that need no placement: which answers of an instance are the client's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import ApiRequestError, ErrorFormat
from pointsman_gateway.core.http_message import Headers
from pointsman_gateway.core.memory_budget import Holding, MemoryBudget
from pointsman_gateway.core.pool_state import PoolState
from pointsman_gateway.io.engines.engine_client import Upstream
from pointsman_gateway.io.engines.engine_connection import UpstreamResponse
from pointsman_gateway.io.request.unplaced_proxy import UnplacedProxy
from pointsman_gateway.io.settings import GatewaySettings

POOL = placement_pb2.Pool(
    model="m", instances=[placement_pb2.InstanceRef(instance_id=name, url=f"http://{name}:1") for name in "ab"]
)


class Engines(Upstream):
    """Each instance has one answer: (status, body)."""

    def __init__(self, **answers: tuple[int, bytes]) -> None:
        super().__init__(GatewaySettings(), mock.Mock())
        self.answers = answers

    async def send(self, target: Any, *_: Any) -> UpstreamResponse:
        answer = UpstreamResponse(mock.Mock())
        answer.status, body = self.answers[target.instance_id]
        answer.headers = Headers([("Content-Type", "application/json")])
        answer.take(body)
        answer.end(None)
        return answer


async def answer_of(**answers: tuple[int, bytes]) -> tuple[int, bytes]:
    pools = mock.Mock(resolve=lambda _: (PoolState(POOL), ""))
    proxy = UnplacedProxy(Engines(**answers), pools, mock.Mock(inflight=dict), 60.0)
    held = Holding(MemoryBudget(1 << 20))
    try:
        found = await proxy.forward("m", "/tokenize", b"{}", ErrorFormat.OPENAI, held)
    except ApiRequestError as error:
        return error.status, b""
    return found.status, found.body


@pytest.mark.parametrize("odd", [(307, b""), (200, b"<html></html>"), (200, b"")])
async def test_what_a_server_before_an_engine_says_is_no_answer(odd: tuple[int, bytes]) -> None:
    good = 200, b'{"count":1}'
    assert await answer_of(a=odd, b=good) == await answer_of(a=good, b=odd) == good
    assert await answer_of(a=odd, b=odd) == (502, b"")
