"""The gateway's HTTP surface: an allow-list of routes, OpenAI-style errors, and the way from a body to a placement."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
import msgspec
import structlog
from aiohttp import web
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pointsman.router.v1 import placement_pb2
from services.common.keys import prompt_keys
from services.common.settings import Tokens
from services.gateway import choreography
from services.gateway.auth import DEFAULT_TENANT, ApiKeys
from services.gateway.chat_template import Unrenderable
from services.gateway.conduct import Conductor, Job, Tools
from services.gateway.dialects import Call, DialectError, Kind, Rules, estimated_tokens, parse
from services.gateway.pools import Exactness, Pools, PoolState
from services.gateway.router_client import RouterAway, RouterClient
from services.gateway.sessions import Sessions, bounded_id
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry import Telemetry
from services.gateway.tokens import INLINE_BYTES, ModelTokenizer
from services.gateway.upstream import FORWARD_UP, Upstream

log = structlog.get_logger()

EXPLAIN_S = 10.0
MAX_TRACEPARENT = 128
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MODEL = web.RequestKey("model", str)


class Gateway:
    """Everything one gateway holds. start() and close() bracket its life; `application` is what serves it."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises ValueError or OSError for an unusable api_keys_file."""
        self._settings = settings
        self._keys = ApiKeys.load(settings.api_keys_file) if settings.api_keys_file else ApiKeys()
        self._sessions = Sessions()
        self.telemetry = Telemetry()
        self._upstream = Upstream(settings)
        self.pools = Pools(self._upstream, self.telemetry, settings.tokenizer_paths())
        self.router = RouterClient(
            settings.routers,
            settings.gateway_id,
            Tokens().of("gateway"),
            settings.router_grace_s,
            self.pools.update,
            self.telemetry.router.set,
        )
        self._tools = Tools(
            self.router,
            self._upstream,
            self.pools,
            self.telemetry,
            choreography.Limits(settings.place_timeout_s, settings.first_byte_timeout_s, settings.first_byte_timeout_s),
            settings.answer_timeout_s,
        )

    async def start(self) -> None:
        """Open the pool of connections and begin to dial routers."""
        await self._upstream.start()
        await self.router.start()

    async def close(self) -> None:
        """End background work; open requests should be over."""
        await self.pools.close()
        await self.router.close()
        await self._upstream.close()

    def application(self) -> web.Application:
        """The routes. Anything else is a 404 or 405 in OpenAI's form."""
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[self._errors])
        app.router.add_post(Kind.CHAT.value, self._chat)
        app.router.add_post(Kind.COMPLETION.value, self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # Only a route of ours as a label: a client must not be able to invent label values.
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        status = 499  # the client left
        try:
            answer = await handler(request)
            status = answer.status
        except DialectError as error:
            status = error.status
            answer = _error(error)
        except web.HTTPException as error:
            status = error.status
            answer = _http_error(error)
        except asyncio.CancelledError:
            raise
        except ConnectionResetError:
            # Nobody will read this: aiohttp would log what a handler raises as a fault of ours.
            answer = web.Response(status=status)
        except Exception:
            status = 500
            log.exception("a fault in the gateway", route=route)
            answer = _error(DialectError(500, "The gateway failed.", type_="server_error", code="internal_error"))
        finally:
            self.telemetry.requests.labels(request.get(_MODEL, ""), route, str(status)).inc()
        return answer

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self.telemetry.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _health(self, request: web.Request) -> web.Response:
        states = self.pools.states()
        usable = [state for state in states if state.pool.instances and state.exactness is not Exactness.CHECKING]
        missing = [f"{state.pool.model}: {state.reason}" for state in states if state.exactness is not Exactness.EXACT]
        missing += [f"{state.pool.model}: no instance" for state in states if not state.pool.instances]
        if not self.router.connected:
            missing.insert(0, "no session with a router")
        if not states:
            missing.append("no model")
        body = {
            "status": ("degraded" if missing else "ok") if usable else "unavailable",
            "router_connected": self.router.connected,
            "models": {
                state.pool.model: {
                    "instances": len(state.pool.instances),
                    "tokenizer": state.exactness.value,
                    "exact": state.exactness is Exactness.EXACT,
                    "reason": state.reason,
                }
                for state in states
            },
            "missing": missing,
        }
        return _json(body, 200 if usable else 503)

    async def _models(self, request: web.Request) -> web.Response:
        self._tenant(request)
        names = [
            {"id": name, "object": "model", "created": 0, "owned_by": "pointsman", "root": pool}
            for name, pool in self.pools.names()
        ]
        return _json({"object": "list", "data": names})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Kind.CHAT)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Kind.COMPLETION)

    async def _generate(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        tenant = self._tenant(request)
        if request.content_type != "application/json":
            raise DialectError(415, "Content-Type must be application/json.", code="unsupported_media_type")
        try:
            raw = await request.read()
        except web.RequestPayloadError:
            raise DialectError(400, "The request body cannot be decoded.", code="invalid_body") from None
        received = time.monotonic()
        call = parse(kind, raw, Rules(client_cache_salt=self._settings.client_cache_salt))
        for name in call.stripped:
            self.telemetry.stripped.labels(name).inc()
        found = self.pools.resolve(call.model)
        if found is None:
            if not self.pools.states():
                raise DialectError(
                    503, "No instance is ready.", type_="server_error", code="no_instance", retry_after_s=1.0
                )
            raise DialectError(404, f"The model `{call.model}` does not exist.", param="model", code="model_not_found")
        state, lora = found
        request[_MODEL] = state.pool.model
        dry = request.headers.get("X-Pointsman-Dry-Run", "") == "1"
        job = await self._understand(request, call, state, lora, tenant, received, dry=dry)
        if dry:
            return await self._explain(job)
        return await Conductor(self._tools, job, request).run()

    async def _understand(
        self, request: web.Request, call: Call, state: PoolState, lora: str, tenant: str, received: float, *, dry: bool
    ) -> Job:
        """Tokens, keys and session of a call. Raises DialectError when the prompt is too long. A dry run remembers nothing."""
        request_id = uuid.uuid4().hex
        tokenizer = state.usable
        ids: list[int] | None = None
        keys: list[int] = []
        count = estimated_tokens(call)
        if tokenizer is not None:
            try:
                ids, keys, longest = await self._tokens(call, tokenizer, state.pool.model, lora)
                count = len(ids)
                _check_length(call, longest, state.pool.max_model_len)
            except Unrenderable as reason:
                log.debug("placed without keys", request_id=request_id, reason=str(reason))
        if not keys:
            self.telemetry.keyless.labels(state.pool.model).inc()
        hint = request.headers.get("X-Session-ID") or call.session_hint
        if dry:
            session = bounded_id(hint) if hint else (self._sessions.find(tenant, keys) or "")
        else:
            session = self._sessions.resolve(tenant, keys, hint=hint, fresh=f"s-{request_id}")
        traceparent = request.headers.get("traceparent", "")
        placement = placement_pb2.PlacementRequest(
            request_id=request_id,
            model=call.model,
            tenant=tenant,
            session_id=session,
            input_tokens=count,
            keys=keys,
            max_output_tokens=call.max_output_tokens,
            traceparent=traceparent if len(traceparent) <= MAX_TRACEPARENT else "",
        )
        headers = {name: request.headers[name] for name in FORWARD_UP if name in request.headers}
        headers["X-Request-ID"] = bounded_id(request.headers.get("X-Request-ID", "") or request_id)
        headers["X-Session-ID"] = bounded_id(session if tenant == DEFAULT_TENANT else f"{tenant}/{session}")
        several = (
            call.kind is Kind.COMPLETION
            and isinstance(call.body.get("prompt"), list)
            and ids is not call.body["prompt"]
        )
        if several and len(call.body["prompt"]) > 1:
            ids = None  # of several prompts only the first was counted
        return Job(request_id, call, state, placement, ids, headers, received)

    async def _tokens(
        self, call: Call, tokenizer: ModelTokenizer, model: str, lora: str
    ) -> tuple[list[int], list[int], int]:
        """Ids and keys of the (first) prompt, and the longest prompt's length. Raises Unrenderable."""

        def work() -> tuple[list[int], list[int], int]:
            prompt = tokenizer.prompt(call)
            ids = prompt.ids if isinstance(prompt.ids, list) else list(prompt.ids)
            return ids, prompt_keys(ids, model, lora, call.cache_salt), prompt.longest

        with self.telemetry.tokenize.time():
            return work() if len(call.payload) <= INLINE_BYTES else await asyncio.to_thread(work)

    async def _explain(self, job: Job) -> web.Response:
        try:
            decision = await self.router.explain(job.placement, EXPLAIN_S)
        except RouterAway:
            message = "No router is there to explain."
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise DialectError(404, error.details() or "unknown", code="model_not_found") from None
            message = f"The router cannot explain: {error.code().name}"
        else:
            return _json({"decision": MessageToDict(decision, preserving_proto_field_name=True)})
        raise DialectError(503, message, type_="server_error", code="unavailable", retry_after_s=1.0)

    def _tenant(self, request: web.Request) -> str:
        tenant = self._keys.tenant_of(request.headers.get("Authorization", ""))
        if tenant is None:
            raise DialectError(401, "A valid API key is needed.", code="invalid_api_key")
        return tenant


def _check_length(call: Call, longest: int, limit: int) -> None:
    if limit and (longest >= limit or longest + call.max_output_tokens > limit):
        asked = f" and {call.max_output_tokens} of output" if call.max_output_tokens else ""
        raise DialectError(
            400,
            f"The model's context is {limit} tokens, but the request needs {longest} of input{asked}.",
            param="messages" if call.kind is Kind.CHAT else "prompt",
            code="context_length_exceeded",
        )


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def _error(error: DialectError) -> web.Response:
    return web.Response(
        body=error.body(), status=error.status, headers=error.headers(), content_type="application/json"
    )


def _http_error(error: web.HTTPException) -> web.Response:
    messages = {
        404: ("Unknown path.", "not_found"),
        405: ("This path does not take that method.", "method_not_allowed"),
        413: ("The request body is too large.", "body_too_large"),
    }
    message, code = messages.get(error.status, (error.reason, "bad_request"))
    answer = _error(DialectError(error.status, message, code=code))
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer
