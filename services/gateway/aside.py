"""Requests that cost an instance no step: its HTTP server answers them alone, so nobody places them.

Tokens and counts come from any instance of the model; a stored response only from the instance that made it.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode

from services.gateway.dialects import DialectError, Form, Kind, engine_error
from services.gateway.dialects.responses import stored_at
from services.gateway.events import EventStream
from services.gateway.http.exchange import Answer
from services.gateway.http.message import Request, Response
from services.gateway.passage import pass_on
from services.gateway.placing import least_inflight, target_of
from services.gateway.pools import Pools
from services.gateway.router_client import RouterClient
from services.gateway.upstream import Upstream, UpstreamError, down_headers

STORED = re.compile(r"/v1/responses/([^/]{1,200})(/cancel)?")
_QUERY = ("stream", "starting_after")
_TRIES = 2


@dataclass
class Aside:
    """Sends such requests. `within_s` bounds the wait for an answer."""

    upstream: Upstream
    pools: Pools
    router: RouterClient
    within_s: float
    turn: int = 0

    async def ask(self, model: str, path: str, payload: bytes, form: Form) -> Response:
        """The answer of the least busy instance of the pool `model`, or of another one when it fails. Raises DialectError."""
        found = self.pools.resolve(model)
        instances = {one.instance_id: one for one in found[0].pool.instances} if found else {}
        tried: tuple[str, ...] = ()
        for _ in range(_TRIES):
            self.turn += 1
            chosen = least_inflight(sorted(instances), self.router.inflight(), tried, self.turn)
            if chosen is None:
                break
            tried += (chosen,)
            try:
                async with asyncio.timeout(self.within_s):
                    answer = await self.upstream.send(target_of(instances[chosen]), "POST", path, payload, _JSON)
                    body = await self.upstream.read_all(answer)
            except (UpstreamError, TimeoutError):
                continue
            if answer.status < 500:
                return _whole(answer, body, form)
        if tried:
            raise DialectError(502, "The instance failed.", type_="server_error", code="instance_failed")
        raise DialectError(503, "No instance is ready.", type_="server_error", code="no_instance", retry_after_s=1.0)

    async def stored(self, request: Request, tenant: str) -> Response | None:
        """Read or cancel a stored response where it is; None when it was streamed. Raises DialectError."""
        found = STORED.fullmatch(request.path)
        assert found is not None, "the route matched"
        id_ = unquote(found[1])
        instances = {one.instance_id: one for state in self.pools.states() for one in state.pool.instances}
        here = stored_at(id_, tenant, instances)
        if here is None:
            raise not_stored(id_)
        asked = [(name, value) for name, value in parse_qsl(request.query) if name in _QUERY]
        path = f"/v1/responses/{id_}{found[2] or ''}" + (f"?{urlencode(asked)}" if asked else "")
        method = "POST" if found[2] else "GET"
        try:
            async with asyncio.timeout(self.within_s):
                answer = await self.upstream.send(target_of(instances[here]), method, path, b"", _JSON)
                if answer.status < 400 and answer.media_type == "text/event-stream":
                    streamed = await answer.begun()
                else:
                    streamed, body = False, await self.upstream.read_all(answer)
        except (UpstreamError, TimeoutError):
            raise DialectError(502, "The instance failed.", type_="server_error", code="instance_failed") from None
        if not streamed:
            return _whole(answer, body, Form.RESPONSES)
        events, out = EventStream(Kind.RESPONSES), request.outgoing
        try:
            out.begin(answer.status, down_headers(answer.headers), answer)
            await pass_on(answer, events, out)
        except UpstreamError:
            out.write(events.failure())
        finally:
            answer.close()
        out.end()
        return None


_JSON = {"Content-Type": "application/json"}


def not_stored(id_: str) -> DialectError:
    """No instance has this response, or it is another tenant's."""
    return DialectError(404, f"Response with id '{id_}' not found.", param="response_id", code="not_found")


def _whole(answer: Answer, body: bytes, form: Form) -> Response:
    if answer.status >= 500:
        raise DialectError(502, "The instance failed.", type_="server_error", code="instance_failed")
    headers = down_headers(answer.headers)
    if answer.status >= 400:
        return Response(answer.status, engine_error(form, answer.status, body), headers | _JSON)
    return Response(answer.status, body, headers)
