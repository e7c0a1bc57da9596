"""Proxies requests that need no placement: token counts, tokenisation, and stored responses.

Any instance of the model answers for tokens and counts; only the instance that created a stored response can return it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlencode

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import ApiRequestError, Endpoint, ErrorFormat, redact_error
from pointsman_gateway.core.forwarded_headers import client_headers, error_headers
from pointsman_gateway.core.http_message import JSON_FIELDS, Request, Response
from pointsman_gateway.core.memory_budget import Holding
from pointsman_gateway.core.pool_state import instances_without
from pointsman_gateway.core.request.local_placement import least_inflight
from pointsman_gateway.core.request.placement_messages import target_of
from pointsman_gateway.core.stored_responses import StoredResponse, find, says_not_stored
from pointsman_gateway.core.streaming.answer_form import has_json_form
from pointsman_gateway.core.streaming.pings import ping_in_silence
from pointsman_gateway.core.streaming.sse import SseFilter
from pointsman_gateway.io.engines.engine_client import Upstream, UpstreamError, relay_stream
from pointsman_gateway.io.engines.engine_connection import UpstreamResponse
from pointsman_gateway.io.request.ext_proc_request import ExtProcRequest
from pointsman_gateway.io.routing.model_pools import ModelPools
from pointsman_gateway.io.routing.router_client import RouterClient

STORED_RESPONSE_PATH = re.compile(r"/v1/responses/([^/]{1,200})(/cancel)?")
_QUERY = ("stream", "starting_after")
_TRIES = 2
# Time without an answer after which another instance is asked, s: engines count and tokenise without a step.
ANOTHER_S = 5.0
# Time for which an instance that was silent so long is asked only if no other is there, s.
AVOIDED_S = 30.0
NOT_FOUND = 404


@dataclass
class UnplacedProxy:
    """Sends unplaced requests to instances. `timeout_s`: maximum wait for an answer, s."""

    upstream: Upstream  # client of all engines
    pools: ModelPools  # of whose instances one is chosen
    router: RouterClient  # only read: open requests by instance, whether the fleet is known
    timeout_s: float
    round_robin: int = 0  # tries so far; chooses among instances with equally many open requests
    _open: Counter[str] = field(default_factory=Counter)  # own open requests by instance
    _avoided: dict[str, float] = field(default_factory=dict)  # silent instances, and until when, monotonic s

    async def forward(
        self, model: str, path: str, payload: bytes, error_format: ErrorFormat, held: Holding
    ) -> Response:
        """Return the answer of the instance of `model` with the fewest open requests or, if that one fails or is silent for
        ANOTHER_S, of another one.

        `held` counts the size of the answer. Raises ApiRequestError. Mutates `held`.
        """
        found = self.pools.resolve(model)
        instances = {instance.instance_id: instance for instance in found[0].pool.instances} if found else {}
        tried = tuple(instances_without(found[0].pool, model)) if found else ()
        failed = False
        error: Response | None = None  # of the last instance that answered
        for tries_left in reversed(range(_TRIES)):
            self.round_robin += 1
            load = self._open + Counter(self.router.inflight())
            now, ids = time.monotonic(), sorted(instances)
            self._avoided = {name: until for name, until in self._avoided.items() if now < until}
            chosen = least_inflight(ids, load, (*tried, *self._avoided), self.round_robin) or least_inflight(
                ids, load, tried, self.round_robin
            )
            if chosen is None:
                break
            tried, failed = (*tried, chosen), True
            limit_s = min(ANOTHER_S, self.timeout_s) if tries_left and len(tried) < len(instances) else self.timeout_s
            try:
                async with (
                    asyncio.timeout(limit_s),
                    self._exchange(instances[chosen], "POST", path, payload) as answer,
                ):
                    body = await self.upstream.read_all(answer, held=held)
            except TimeoutError:
                self._avoided[chosen] = time.monotonic() + AVOIDED_S
                continue
            except UpstreamError:
                continue
            if answer.status == 200 and not has_json_form(body):
                continue
            whole = _whole(answer, body, error_format)
            if answer.status < 500:
                return whole
            error = whole
        if error is not None:
            return error
        if failed:
            raise ApiRequestError(502, "The instance failed.", code="instance_failed")
        raise ApiRequestError(503, "No instance is ready.", code="no_instance")

    def find(self, id_: str, tenant: str) -> StoredResponse:
        """Return where a response is stored. Raises ApiRequestError."""
        return find(id_, tenant, (state.pool for state in self.pools.states()), complete=self.router.knows_fleet)

    async def stored(self, request: Request, tenant: str, silence_s: float) -> Response | None:
        """Read or cancel a stored response on the instance that has it. Return None if the answer was streamed, with pings after
        each `silence_s` (0: none). Raises ApiRequestError."""
        found = STORED_RESPONSE_PATH.fullmatch(request.path)
        assert found is not None, "the route matched"
        stored = self.find(unquote(found[1]), tenant)
        asked = [(name, value) for name, value in parse_qsl(request.query) if name in _QUERY]
        # An answer to HEAD has no body to stream, so it is the head of the whole response. A proxy gets whole answers only.
        asked = [] if request.method == "HEAD" or isinstance(request, ExtProcRequest) else asked
        path = f"/v1/responses/{stored.id}{found[2] or ''}" + (f"?{urlencode(asked)}" if asked else "")
        try:
            async with (
                asyncio.timeout(self.timeout_s) as limit,
                self._exchange(stored.instance, "POST" if found[2] else "GET", path) as answer,
            ):
                if answer.status < 400 and answer.headers.media_type == "text/event-stream":
                    ping_in_silence(request, ErrorFormat.RESPONSES, silence_s, time.monotonic())
                    if await answer.begun():
                        limit.reschedule(None)  # the timeout does not apply to the length of a stream
                        await _relay(answer, request)
                        return None
                body = await self.upstream.read_all(answer, held=request.held_answer)
                if answer.status == NOT_FOUND and says_not_stored(body):
                    raise stored.missing(stored.instance.incarnation)
                return _whole(answer, body, ErrorFormat.RESPONSES)
        except (UpstreamError, TimeoutError):
            raise ApiRequestError(502, "The instance failed.", code="instance_failed") from None

    @asynccontextmanager
    async def _exchange(
        self, instance: placement_pb2.InstanceRef, method: str, path: str, payload: bytes = b""
    ) -> AsyncIterator[UpstreamResponse]:
        """Send a request and yield the instance's answer. It is closed at the end of the block, also after a timeout or a
        disconnect. Raises UpstreamError."""
        self._open[instance.instance_id] += 1
        try:
            answer = await self.upstream.send(target_of(instance), method, path, payload, JSON_FIELDS)
            try:
                if 300 <= answer.status < 400:  # of a server before the engine
                    raise UpstreamError(f"status {answer.status}", answer.status)
                yield answer
            finally:
                answer.close()
        finally:
            self._open[instance.instance_id] -= 1
            self._open += Counter()  # without those that are 0


async def _relay(answer: UpstreamResponse, request: Request) -> None:
    """Relay a stream to the client. On a failure the stream ends with an error event."""
    events, out = SseFilter(Endpoint.RESPONSES), request.writer
    out.begin(answer.status, client_headers(answer.headers), answer)
    try:
        await relay_stream(answer, events, out)
    except UpstreamError:
        out.write(events.failure_event())
    except asyncio.CancelledError:
        if not out.lost:  # the client is still connected: the drain has ended
            out.write(events.failure_event())
            out.end()
        raise
    out.end()


def _whole(answer: UpstreamResponse, body: bytes, error_format: ErrorFormat) -> Response:
    if answer.status >= 400:
        redacted = redact_error(error_format, answer.status, body)
        return Response(answer.status, redacted, error_headers(answer.headers))
    return Response(answer.status, body, client_headers(answer.headers))
