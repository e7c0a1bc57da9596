"""Proxies the requests that need no placement: token counts, tokenisation, and stored responses.

Tokens and counts come from any instance of the model; a stored response only from the instance that made it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode

from pointsman.gateway.core.api import ApiRequestError, Endpoint, ErrorFormat, redact_error
from pointsman.gateway.core.api.openai_responses import not_stored, storing_instance
from pointsman.gateway.core.forwarded_headers import client_headers
from pointsman.gateway.core.http_message import Request, Response
from pointsman.gateway.core.memory_budget import Holding
from pointsman.gateway.core.request.local_placement import least_inflight
from pointsman.gateway.core.request.placement_messages import target_of
from pointsman.gateway.core.streaming.sse import SseFilter
from pointsman.gateway.io.engines.engine_client import Upstream, UpstreamError, relay_stream
from pointsman.gateway.io.engines.engine_connection import UpstreamResponse
from pointsman.gateway.io.routing.model_pools import ModelPools
from pointsman.gateway.io.routing.router_client import RouterClient
from pointsman.router.v1 import placement_pb2

STORED_RESPONSE_PATH = re.compile(r"/v1/responses/([^/]{1,200})(/cancel)?")
_QUERY = ("stream", "starting_after")
_TRIES = 2


@dataclass
class UnplacedProxy:
    """Sends such requests. `within_s` bounds the wait for an answer."""

    upstream: Upstream
    pools: ModelPools
    router: RouterClient
    timeout_s: float
    round_robin: int = 0

    async def forward(
        self, model: str, path: str, payload: bytes, error_format: ErrorFormat, held: Holding
    ) -> Response:
        """The answer of the least busy instance of the pool `model`, or of another one when it fails; `held` counts it. Raises
        ApiRequestError. Mutates `held`."""
        found = self.pools.resolve(model)
        instances = {one.instance_id: one for one in found[0].pool.instances} if found else {}
        tried: tuple[str, ...] = ()
        for _ in range(_TRIES):
            self.round_robin += 1
            chosen = least_inflight(sorted(instances), self.router.inflight(), tried, self.round_robin)
            if chosen is None:
                break
            tried += (chosen,)
            try:
                async with (
                    asyncio.timeout(self.timeout_s),
                    self._exchange(instances[chosen], "POST", path, payload) as answer,
                ):
                    body = await self.upstream.read_all(answer, held=held)
            except (UpstreamError, TimeoutError):
                continue
            if answer.status < 500:
                return _whole(answer, body, error_format)
        if tried:
            raise ApiRequestError(502, "The instance failed.", type_="server_error", code="instance_failed")
        raise ApiRequestError(503, "No instance is ready.", type_="server_error", code="no_instance", retry_after_s=1.0)

    async def stored(self, request: Request, tenant: str) -> Response | None:
        """Read or cancel a stored response where it is; None when it was streamed. Raises ApiRequestError."""
        found = STORED_RESPONSE_PATH.fullmatch(request.path)
        assert found is not None, "the route matched"
        id_ = unquote(found[1])
        instances = {one.instance_id: one for state in self.pools.states() for one in state.pool.instances}
        here = storing_instance(id_, tenant, instances)
        if here is None:
            raise not_stored(id_)
        asked = [(name, value) for name, value in parse_qsl(request.query) if name in _QUERY]
        # A head has no body to stream: HEAD is answered as the whole response would be.
        asked = [] if request.method == "HEAD" else asked
        path = f"/v1/responses/{id_}{found[2] or ''}" + (f"?{urlencode(asked)}" if asked else "")
        try:
            async with (
                asyncio.timeout(self.timeout_s) as limit,
                self._exchange(instances[here], "POST" if found[2] else "GET", path) as answer,
            ):
                if answer.status < 400 and answer.media_type == "text/event-stream" and await answer.begun():
                    limit.reschedule(None)  # a stream lasts as long as it does
                    await _relay(answer, request)
                    return None
                body = await self.upstream.read_all(answer, held=request.held_answer)
                return _whole(answer, body, ErrorFormat.RESPONSES)
        except (UpstreamError, TimeoutError):
            raise ApiRequestError(502, "The instance failed.", type_="server_error", code="instance_failed") from None

    @asynccontextmanager
    async def _exchange(
        self, instance: placement_pb2.InstanceRef, method: str, path: str, payload: bytes = b""
    ) -> AsyncIterator[UpstreamResponse]:
        """The answer of an instance, closed at the end: where the client or the time left, nobody else would. Raises
        UpstreamError."""
        answer = await self.upstream.send(target_of(instance), method, path, payload, _JSON)
        try:
            yield answer
        finally:
            answer.close()


async def _relay(answer: UpstreamResponse, request: Request) -> None:
    """Pass a stream on; whatever fails ends it with an error event."""
    events, out = SseFilter(Endpoint.RESPONSES), request.writer
    out.begin(answer.status, client_headers(answer.headers), answer)
    try:
        await relay_stream(answer, events, out)
    except UpstreamError:
        out.write(events.failure_event())
    except asyncio.CancelledError:
        if not out.lost:  # the drain is over
            out.write(events.failure_event())
            out.end()
        raise
    out.end()


_JSON = {"Content-Type": "application/json"}


def _whole(answer: UpstreamResponse, body: bytes, error_format: ErrorFormat) -> Response:
    if answer.status >= 500:
        raise ApiRequestError(502, "The instance failed.", type_="server_error", code="instance_failed")
    headers = client_headers(answer.headers)
    if answer.status >= 400:
        return Response(answer.status, redact_error(error_format, answer.status, body), headers | _JSON)
    return Response(answer.status, body, headers)
