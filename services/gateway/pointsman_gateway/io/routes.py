"""The gateway's HTTP handler: routes, access checks, and the processing of a request from its body to its answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import grpc.aio
import msgspec
import structlog
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST

from pointsman.router.v1 import placement_pb2
from pointsman_common.io.auth import showing
from pointsman_common.io.channel import open_channel
from pointsman_common.io.line_file import LostLines
from pointsman_common.io.metrics_page import PacedPage, metrics_page
from pointsman_common.io.settings import Tokens
from pointsman_common.io.tls import TlsSettings
from pointsman_gateway.core.api import (
    ROUTES,
    ApiCall,
    ApiRequestError,
    ClientRules,
    ContextExceeded,
    Endpoint,
    ErrorFormat,
    error_format_of,
    with_request_id,
)
from pointsman_gateway.core.api.decode_body import Decoded, decode_light
from pointsman_gateway.core.body_decompression import ACCEPTED, encoding_of
from pointsman_gateway.core.cors import CorsPolicy
from pointsman_gateway.core.http_message import JSON_FIELDS, Request, Response
from pointsman_gateway.core.memory_budget import MemoryBudget
from pointsman_gateway.core.pool_state import TokenizerStatus
from pointsman_gateway.core.rate_limit_headers import anthropic_fields, openai_fields
from pointsman_gateway.core.rate_limits import KeyCharge, LimitStatus, RateLimited, RateLimiter
from pointsman_gateway.core.request.attempt_end_reports import AttemptBreakdown
from pointsman_gateway.core.request.placement_messages import target_of
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.request_events import RequestTimeouts
from pointsman_gateway.core.request.request_spans import request_span
from pointsman_gateway.core.request.sessions import bounded_id
from pointsman_gateway.core.request_usage import CLIENT_LEFT, OK, RequestUsage, UsageLine, outcome_of
from pointsman_gateway.core.stored_responses import not_stored
from pointsman_gateway.core.streaming.pings import as_event, ping_in_silence
from pointsman_gateway.core.tenant_pace import TenantPace
from pointsman_gateway.core.tenants import DEFAULT_TENANT, Client
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.api_keys import ApiKeys, KeysFromEnvironment
from pointsman_gateway.io.engines.engine_client import Upstream
from pointsman_gateway.io.engines.remote_prefill import EngineIdCache, KvReleases
from pointsman_gateway.io.http.server_types import SHUTTING_DOWN
from pointsman_gateway.io.processes.shared_key_limits import SharedKeyLimitsFile
from pointsman_gateway.io.processes.sibling_processes import SiblingProcesses
from pointsman_gateway.io.request.ext_proc_request import ExtProcRequest, Proxy
from pointsman_gateway.io.request.request_runner import RequestRunner
from pointsman_gateway.io.request.shared_context import SharedContext
from pointsman_gateway.io.request.threaded_preparer import COUNTED_BYTES, ThreadedPreparer
from pointsman_gateway.io.request.unplaced_proxy import STORED_RESPONSE_PATH, UnplacedProxy
from pointsman_gateway.io.routing.key_limit_leases import KeyLimitLeases
from pointsman_gateway.io.routing.model_pools import ModelPools
from pointsman_gateway.io.routing.router_client import NoRouter, RouterClient
from pointsman_gateway.io.routing.router_stream import Dial
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_gateway.io.telemetry.line_log import LineLog
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics
from pointsman_gateway.io.telemetry.request_traces import RequestTraces
from pointsman_gateway.io.tokenizer_files import HubRules

if TYPE_CHECKING:
    from pointsman_common.io.otlp import Tracer

log = structlog.get_logger()

VERSION = version("pointsman")
# Timeout of the router's answer to a dry run, s.
EXPLAIN_S = 10.0
# Maximum time after its start for which a gateway lets requests wait for the first description of the fleet, s.
FIRST_FLEET_S = 5.0
SESSIONS_PATH = "/v1/sessions/"
# Maximum number of calls that a gateway process takes from one tenant per second, and at once, whatever its keys' limits: routers
# work on them, and no engine slows them down.
SESSION_ENDS_PER_S, SESSION_ENDS_AT_ONCE = 100.0, 500
DRY_RUNS_PER_S, DRY_RUNS_AT_ONCE = 20.0, 50
Handler = Callable[[Request], Awaitable[Response | None]]


@dataclass(frozen=True)
class Route:
    """One path, or all paths of a pattern; `name` is the label in metrics. `open`: needs no key; `body`: needs a JSON body."""

    name: str
    method: str  # the only one besides OPTIONS; GET includes HEAD
    handler: Handler  # called when the body has arrived; returns None if it has streamed its answer
    open: bool = False
    body: bool = False

    @property
    def allowed(self) -> str:
        """The route's methods, as the value of the header Allow."""
        return "GET, HEAD" if self.method == "GET" else self.method


class Gateway:
    """One gateway: all of its components, and the handler of its HTTP server. Call start() first and close() at the end."""

    def __init__(
        self, settings: GatewaySettings, siblings: SiblingProcesses | None = None, dial: Dial = open_channel
    ) -> None:
        """`siblings`: this process and the others that share the address. `dial` opens the channels to routers. Raises ValueError
        or OSError for an unusable api_keys_file, breakdown_file or usage_file, and for invalid TLS settings of connections to
        routers."""
        TlsSettings().for_channel()
        self._siblings = siblings
        self._settings = settings
        self.keys = ApiKeys(settings.api_keys_file, KeysFromEnvironment().lines())
        self._shared_usage: SharedKeyLimitsFile | None = None
        self._rate_limiter = RateLimiter()
        if siblings is not None:
            self._shared_usage = SharedKeyLimitsFile(siblings.limits_file, siblings.number, siblings.count)
            self._rate_limiter = RateLimiter(self._shared_usage.usage_of)
        self._aliases = settings.alias_map()
        self._cors = CorsPolicy(settings.cors_origins)
        token_cache = TokenCache(settings.token_cache_mb << 20)
        self.telemetry = GatewayMetrics(token_cache)
        self._metrics_page = PacedPage(
            partial(metrics_page, self.telemetry.registry) if siblings is None else siblings.page
        )
        self._preparer = ThreadedPreparer(self.telemetry, token_cache, agent_headers=settings.agent_headers)
        self._upstream = Upstream(settings)
        self._breakdown = LineLog[AttemptBreakdown](settings.breakdown_file, settings.breakdown_max_mb << 20)
        self._usage_log = LineLog[UsageLine](settings.usage_file)
        self.telemetry.registry.register(LostLines("gateway", lambda: self._breakdown.lost + self._usage_log.lost))
        self._tracer: Tracer | None = None
        self._traces: RequestTraces | None = None
        if settings.otlp_endpoint:
            from pointsman_common.io.otlp import Tracer

            self._tracer = Tracer(settings.otlp_endpoint, "gateway", settings.gateway_id)
            self._traces = RequestTraces(self._tracer.send, settings.trace_sample_ratio)
        hub = HubRules(tuple(settings.hub_owners), settings.engine_cache)
        self.pools = ModelPools(self._upstream, self.telemetry, settings.tokenizer_paths(), token_cache, hub)
        self._fleet_came = asyncio.Event()
        self._waits_until = 0.0  # for the first description of the fleet, by the event loop's clock, s
        self.router = RouterClient(
            settings.routers,
            f"{settings.gateway_id}-{secrets.token_hex(4)}",
            showing(Tokens(), "gateway"),
            settings.router_grace_s,
            self._fleet_changed,
            self.telemetry.router.set,
            dial,
            settings.url,
        )
        self.telemetry.open.set_function(lambda: self.router.open_count)
        self.telemetry.unconfirmed_ends.set_function(lambda: self.router.unconfirmed_ends)
        self.telemetry.limit_gateways.set_function(lambda: self._rate_limiter.gateways)
        group = settings.gateway_id if siblings is None else settings.gateway_id.removesuffix(f"-{siblings.number}")
        self._leases = KeyLimitLeases(
            self._rate_limiter, self.router, group, lambda: self.keys.limited, self.telemetry.accounted.set
        )
        timeouts = RequestTimeouts(
            placement_s=settings.placement_timeout_s,
            prefill_s=settings.prefill_timeout_s,
            first_byte_s=settings.first_byte_timeout_s,
            transfer_s=settings.transfer_timeout_s,
        )
        self._releases = KvReleases(self._upstream, lambda outcome: self.telemetry.kv_releases.labels(outcome).inc())
        self._shared = SharedContext(
            self.router,
            self._upstream,
            EngineIdCache(self._upstream),
            self._releases,
            self.pools,
            self.telemetry,
            timeouts,
            replace(timeouts, first_byte_s=settings.response_timeout_s),
            self._breakdown,
            settings.expose_placement,
            settings.mark_session_ends,
            MemoryBudget(settings.continue_mb << 20),
            settings.ext_proc_fallbacks,
        )
        self.ext_proc_port = 0
        """Port of the server for proxies; 0: there is none."""
        self.proxy_streams: Collection[object] = ()
        """The open requests that proxies carry."""
        self._unplaced_proxy = UnplacedProxy(self._upstream, self.pools, self.router, settings.first_byte_timeout_s)
        routes = [
            *(Route(path, "POST", partial(self._call, endpoint), body=True) for path, endpoint in ROUTES.items()),
            Route("/v1/models", "GET", self._models),
            Route("/health", "GET", self._health, open=True),
            Route("/ready", "GET", self._health, open=True),
            Route("/ping", "GET", self._health, open=True),
            Route("/version", "GET", self._version),
            Route("/load", "GET", self._load),
            Route("/livez", "GET", self._livez, open=True),
            Route("/metrics", "GET", self._metrics, open=True),
        ]
        self._session_end_pace = TenantPace(SESSION_ENDS_PER_S, SESSION_ENDS_AT_ONCE)
        self._dry_run_pace = TenantPace(DRY_RUNS_PER_S, DRY_RUNS_AT_ONCE)
        self._routes = {route.name: route for route in routes}
        self._model = Route("/v1/models/{id}", "GET", self._one_model)
        self._session = Route("/v1/sessions/{id}", "DELETE", self._end_session)
        self._stored = Route("/v1/responses/{id}", "GET", self._stored_response)
        self._cancel = Route("/v1/responses/{id}/cancel", "POST", self._stored_response)

    @property
    def usable(self) -> bool:
        """Whether at least one model has instances and a tokenizer whose first check has ended."""
        return any(
            state.pool.instances and state.tokenizer_status is not TokenizerStatus.CHECKING
            for state in self.pools.states()
        )

    async def start(self) -> None:
        """Open the connection pool and start to dial routers."""
        if self._siblings is not None:
            await self._siblings.start(self.telemetry.registry)
        await self._upstream.start()
        self._waits_until = asyncio.get_running_loop().time() + FIRST_FLEET_S
        await self.router.start()
        await self._leases.start()

    async def close(self) -> None:
        """End all background work. Open requests should have ended before."""
        self._preparer.close()
        await self.pools.close()
        await self._leases.close()
        await self.router.close()
        await self._releases.close()
        await self._upstream.close()
        self._breakdown.close()
        self._usage_log.close()
        if self._tracer is not None:
            await self._tracer.close()
        if self._siblings is not None:
            await self._siblings.close()
        if self._shared_usage is not None:
            self._shared_usage.close()

    # Calls from the server (HttpHandler).

    def admit(self, request: Request) -> Response | None:
        """Return a refusal if the request's head is enough for one, else None. Sets the request's ids and the answer's fields."""
        request.id = secrets.token_hex(16)
        request.client_id = bounded_id(request.headers.get("X-Request-ID") or request.id)
        # no-store: an answer to a prompt is private to its client, and answers about the fleet are outdated after a second.
        request.answer_fields = {"X-Request-ID": request.client_id, "Cache-Control": "no-store"}
        error_format = _error_format(request)
        if error_format is ErrorFormat.ANTHROPIC:
            request.answer_fields["request-id"] = request.client_id  # the header that Anthropic's clients read
        request.answer_fields |= self._cors.answer_fields(request.headers.get("Origin"))
        try:
            refusal = self._preflight_or_refusal(request)
        except ApiRequestError as error:
            refusal = _error(error, error_format)
        if refusal is not None:
            self._count(request, refusal.status)
        return refusal and _identified(refusal, error_format, request.client_id)

    async def answer(self, request: Request) -> Response | None:
        """Return the answer of the request's route, or None if the answer was streamed. Errors have the format of the API."""
        route = self._route(request.path)
        assert route is not None, "admit() refuses unknown paths"
        error_format = _error_format(request)
        status = CLIENT_LEFT
        answer: Response | None
        if self._traces is not None and route.body:
            request.trace = self._traces.start(request.headers.get("traceparent"))
        try:
            answer = await route.handler(request)
            if answer is not None and answer.status < 400 and request.writer.opened:
                raise ApiRequestError(502, "The instance did not stream its answer.", code="instance_failed")
            status = 200 if answer is None else answer.status
        except ApiRequestError as error:
            answer = _error(error, error_format)
            status = error.status
        except asyncio.CancelledError:
            if request.usage.outcome == OK:
                status = 200  # the client had the whole answer, and did not wait for the end of its body
            if request.writer.opened and not request.writer.lost:  # the drain has ended
                status, message, code = SHUTTING_DOWN
                _write_error(request, _error(ApiRequestError(status, message, code=code), error_format))
            raise
        except Exception:
            status = 500
            log.exception("a fault in the gateway", route=route.name)
            fault = ApiRequestError(500, "The gateway failed.", code="internal_error")
            answer = _error(fault, error_format)
        finally:
            self._count(request, status)
            self._note_usage(request, status)
            if (trace := request.trace) is not None and trace.context.sampled:
                trace.send([request_span(trace, route.name, request.model, status, time.monotonic())])
        if answer is not None and request.writer.opened:
            _write_error(request, answer)
            return None
        return answer and _identified(answer, error_format, request.client_id)

    def error(self, status: int, message: str, code: str, path: str) -> Response:
        """Return the answer for an error that the HTTP server itself found, in the format of the path's API."""
        self.telemetry.answered("", "other", status)
        error_format = error_format_of(path)
        return _identified(_error(ApiRequestError(status, message, code=code), error_format), error_format, None)

    def _route(self, path: str) -> Route | None:
        # vLLM redirects from a path with a slash at its end.
        if (route := self._routes.get(path) or self._routes.get(path.removesuffix("/"))) is not None:
            return route
        if found := STORED_RESPONSE_PATH.fullmatch(path):
            return self._cancel if found[2] else self._stored
        if path.startswith(SESSIONS_PATH) and path != SESSIONS_PATH:
            return self._session
        return self._model if path.startswith("/v1/models/") else None

    def _preflight_or_refusal(self, request: Request) -> Response | None:
        """Return the answer to a preflight; None for a request whose body is to be read. Raises ApiRequestError."""
        route = self._route(request.path)
        if route is not None and route.open and isinstance(request, ExtProcRequest):
            route = None  # what needs no key is for those who reach the gateway itself
        if route is None and request.method == "OPTIONS" and request.path == "*":
            return Response(204)
        if route is None:
            meant = f"/v1{request.path}"
            hint = f" Is {meant} meant?" if self._route(meant) is not None else ""
            raise ApiRequestError(404, f"Unknown path.{hint}", code="not_found")
        if request.method == "OPTIONS":
            preflight = self._cors.preflight_fields(request.headers, route.allowed)
            return Response(204, headers={"Allow": f"{route.allowed}, OPTIONS"} | preflight)
        if request.method == "GET" and request.headers.get("Upgrade").lower() == "websocket":
            # Codex tries WebSockets first, and goes on over HTTP at once after this status.
            fields = {"Upgrade": "HTTP/1.1"}  # RFC 9110 15.5.22
            message = "This server has no WebSockets. Use HTTP."
            raise ApiRequestError(426, message, code="upgrade_required", fields=fields)
        if request.method not in route.allowed.split(", "):
            message = "This path does not allow that method."
            raise ApiRequestError(405, message, code="method_not_allowed", fields={"Allow": route.allowed})
        if request.surplus and not route.open:
            message = "The gateway has as many connections as it may have."
            raise ApiRequestError(503, message, code="too_many_connections")
        if not route.open:
            request.holder = self._client(request).key
        if route.body and request.headers.media_type != "application/json":
            raise ApiRequestError(415, "Content-Type must be application/json.", code="unsupported_media_type")
        encoding, proxied = encoding_of(request.headers.get("Content-Encoding")), isinstance(request, ExtProcRequest)
        # A proxy that carries the request forwards its body as it is, and engines decode none.
        if encoding is None or (encoding and proxied):
            message = "The body's content encoding is not known here."
            fields = {"Accept-Encoding": "identity" if proxied else ACCEPTED}  # RFC 9110 12.5.3
            raise ApiRequestError(415, message, code="unsupported_encoding", fields=fields)
        return None

    def _count(self, request: Request, status: int) -> None:
        # Only names of routes become label values, so that a client cannot create new ones.
        route = self._route(request.path)
        self.telemetry.answered(request.model, route.name if route else "other", status)

    # Routes.

    async def _metrics(self, request: Request) -> Response:
        return Response(200, await self._metrics_page.get(), {"Content-Type": CONTENT_TYPE_LATEST})

    async def _livez(self, request: Request) -> Response:
        """Return 200 whenever the process answers, whether or not routers and instances are reachable."""
        return Response(200, b"ok\n", {"Content-Type": "text/plain"})

    async def _version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def _load(self, request: Request) -> Response:
        """Return the number of placed requests that this process has open, under the name that vLLM gives its own."""
        return _json({"server_load": self.router.open_count})

    async def _health(self, request: Request) -> Response:
        states = self.pools.states()
        missing = [
            f"{state.pool.model}: {state.reason}"
            for state in states
            if state.tokenizer_status is not TokenizerStatus.EXACT
        ]
        missing += [f"{state.pool.model}: no instance" for state in states if not state.pool.instances]
        if not self.router.connected:
            missing.insert(0, "no session with a router")
        if not states:
            missing.append("no model")
        body: dict[str, Any] = {
            "status": ("degraded" if missing else "ok") if self.usable else "unavailable",
            "router_connected": self.router.connected,
            "models": {
                state.pool.model: {
                    "instances": len(state.pool.instances),
                    "tokenizer": state.tokenizer_status.value,
                    "exact": state.tokenizer_status is TokenizerStatus.EXACT,
                    "encoder": state.tokenizer.encoder.name if state.tokenizer is not None else "",
                    "reason": state.reason,
                }
                for state in states
            },
            "missing": missing,
        }
        if self.ext_proc_port:
            body["picker"] = {"port": self.ext_proc_port, "open_requests": len(self.proxy_streams)}
        return _json(body, 200 if self.usable else 503)

    async def _models(self, request: Request) -> Response:
        cards = [self._card(name, pool) for name, pool in self.pools.names(self._aliases)]
        # Clients of OpenAI and of Anthropic read this list; Anthropic's use the last three fields for paging.
        ends = {"first_id": cards[0]["id"] if cards else None, "last_id": cards[-1]["id"] if cards else None}
        return _json({"object": "list", "data": cards, "has_more": False, **ends})

    async def _one_model(self, request: Request) -> Response:
        asked = unquote(request.path.removeprefix("/v1/models/"))
        for name, pool in self.pools.names(self._aliases):
            if name == asked:
                return _json(self._card(name, pool))
        raise _unknown_model(asked)

    def _card(self, name: str, pool: str) -> dict[str, Any]:
        """Return a model's entry with the fields of OpenAI's API and of Anthropic's.

        If the context length is known it is in `max_model_len`, as in vLLM's answers, and in `max_input_tokens`, as in
        Anthropic's; coding agents plan with it. What of Anthropic's fields is not known is null, as its API has it.
        """
        found = self.pools.resolve(pool)
        context = found[0].pool.max_model_len if found is not None else 0
        openai = {"id": name, "object": "model", "created": 0, "owned_by": "pointsman", "root": pool}
        anthropic = {
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "max_input_tokens": context or None,
            "max_tokens": None,
            "capabilities": None,
        }
        return openai | anthropic | ({"max_model_len": context} if context else {})

    async def _end_session(self, request: Request) -> Response:
        """End a session of the client's tenant. The answer is the same whether or not the session is known."""
        # The bytes of an id become characters as they do in header fields, so that both name the same session.
        session_id = unquote(request.path.removeprefix(SESSIONS_PATH), encoding="latin-1")
        client = self._client(request)
        with closing(await self._charge(request, client)):
            self._keep_pace(self._session_end_pace, client, "ends of sessions")
        self.router.end_session(client.tenant, bounded_id(session_id))
        self.telemetry.session_ends.labels("delete").inc()
        return Response(204)

    async def _stored_response(self, request: Request) -> Response | None:
        client = self._client(request)
        with closing(await self._charge(request, client)):
            return await self._unplaced_proxy.stored(request, client.tenant, self._silence_s(client))

    async def _charge(self, request: Request, client: Client) -> KeyCharge:
        """Count the request against its key's limits, and tell the client what is left. Raises ApiRequestError."""
        error_format = _error_format(request)
        try:
            key_charge = await self._leases.admit(client)
        except RateLimited as limited:
            _tell_limits(request, error_format, limited.status)
            raise self._limited(f"This key's limit of {limited.what} is reached.", limited.retry_after_s) from None
        _tell_limits(request, error_format, key_charge.status)
        return key_charge

    def _keep_pace(self, pace: TenantPace, client: Client, what: str) -> None:
        """Count a call that costs routers work and that no engine slows down. Raises ApiRequestError."""
        if wait_s := pace.take(client.tenant, time.monotonic()):
            raise self._limited(f"This tenant's limit of {pace.per_s:g} {what} per second is reached.", wait_s)

    def _limited(self, message: str, wait_s: float) -> ApiRequestError:
        self.telemetry.limited.inc()
        return ApiRequestError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)

    async def _call(self, endpoint: Endpoint, request: Request) -> Response | None:
        client, now = self._client(request), time.monotonic()
        request.usage = RequestUsage(tenant=client.tenant, api=endpoint.value, received_at=now)
        with closing(await self._charge(request, client)) as key_charge:
            try:
                return await self._admitted(endpoint, request, client, key_charge, now)
            except ContextExceeded as refused:
                # The prompt was parsed and counted, so it is charged: repeated refusals must not be free of cost.
                key_charge.charge(refused.tokens, now)
                raise

    async def _admitted(
        self, endpoint: Endpoint, request: Request, client: Client, key_charge: KeyCharge, received_at: float
    ) -> Response | None:
        dry = request.headers.get("X-Pointsman-Dry-Run", "") == "1"
        if len(request.body) > COUNTED_BYTES:
            await self._preparer.loop_turn(len(request.body))
        light = decode_light(request.body)
        if light is not None:
            read = await self._read(endpoint, request, client, key_charge, received_at, light, dry=dry)
        else:
            async with self._preparer.large_turns.turn(client):
                read = await self._read(endpoint, request, client, key_charge, received_at, None, dry=dry)
        del light  # its values are released
        if isinstance(read, ApiCall):
            return await self._unplaced_proxy.forward(
                read.model, endpoint.value, read.payload, endpoint.error_format, request.held_answer
            )
        key_charge.charge(read.prompt_tokens, received_at)
        if isinstance(request, ExtProcRequest):
            await _keep_within(request.proxy, read)
        if dry:
            return await self._explain(read)
        request.usage.streamed = read.call.stream
        _tell_limits(request, endpoint.error_format, key_charge.status)
        return await RequestRunner(self._shared, read, request).run()

    def _fleet_changed(self, pools: Sequence[placement_pb2.Pool]) -> None:
        self.pools.update(pools)
        # A router that starts knows no pool at first.
        if pools or self.router.knows_fleet:
            self._fleet_came.set()

    async def _first_fleet(self) -> None:
        """Wait until a router has described the fleet, at most until FIRST_FLEET_S after the start."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._waits_until):
                await self._fleet_came.wait()

    async def _read(
        self,
        endpoint: Endpoint,
        request: Request,
        client: Client,
        key_charge: KeyCharge,
        received_at: float,
        light: Decoded | None,
        *,
        dry: bool,
    ) -> RequestContext | ApiCall:
        """Return the context of a request that is prepared; of one that is not placed the call. Neither has the body's values any
        more. Raises ApiRequestError."""
        if not self._fleet_came.is_set():
            await self._first_fleet()
        rules = ClientRules(
            self._aliases,
            self._settings.client_cache_salt,
            client.cache_salt,
            client.tenant == DEFAULT_TENANT,
            self._settings.max_sequences,
        )
        call = await self._preparer.parse(client, endpoint, request.body, rules, self.pools.context_of, light)
        request.body = b""
        for name in call.stripped:
            self.telemetry.stripped.labels(name).inc()
        found = self.pools.resolve(call.model)
        if found is None:
            if not self.pools.states() or self.pools.expects(call.model):
                raise ApiRequestError(503, "No instance is ready.", code="no_instance")
            raise _unknown_model(call.requested_model)
        state, lora = found
        request.model = state.pool.model
        if not endpoint.is_placed:
            call.drop_values()
            return call
        if dry and not self._settings.expose_placement:
            raise ApiRequestError(403, "Dry runs are disabled on this gateway.", code="dry_run_disabled")
        if dry:
            self._keep_pace(self._dry_run_pace, client, "dry runs")
        if call.stream and not dry:
            ping_in_silence(request, endpoint.error_format, self._silence_s(client), received_at)
        continues = None
        if call.previous_response_id:
            continues = self._unplaced_proxy.find(call.previous_response_id, client.tenant)
            if continues.pool != state.pool.model:
                raise not_stored(continues.id, "it is another model's.")
            if not continues.placeable:
                raise continues.unavailable()
        context = RequestContext(
            request.id,
            request.client_id,
            call,
            state,
            lora,
            client,
            request.headers,
            key_charge,
            received_at,
            request.trace,
            continues,
        )
        await self._preparer.prepare(context, dry=dry)
        return context

    def _note_usage(self, request: Request, status: int) -> None:
        """Count one request of a tenant, whatever its outcome, and write its line to the usage file."""
        usage = request.usage
        if not usage.tenant:
            return
        self.telemetry.used(usage.tenant, request.model, usage)
        if self._usage_log.on:
            line = UsageLine(
                time=round(self._usage_log.unix(usage.received_at), 3),
                tenant=usage.tenant,
                request_id=request.client_id,
                model=request.model,
                api=usage.api,
                status=status,
                # The router counts some 5xx of engines as the request's own fault; for the client every 5xx is a failure.
                outcome=outcome_of(status) if status >= 500 else usage.outcome or outcome_of(status),
                stream=usage.streamed,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                duration_s=round(time.monotonic() - usage.received_at, 3),
            )
            self._usage_log.write(line)

    async def _explain(self, context: RequestContext) -> Response:
        try:
            decision = await self.router.explain(context.placement, EXPLAIN_S)
        except NoRouter:
            message = "No router is available for the dry run."
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise ApiRequestError(404, error.details() or "unknown", code="model_not_found") from None
            message = f"The router could not do the dry run: {error.code().name}"
        else:
            return _json({"decision": MessageToDict(decision, preserving_proto_field_name=True)})
        raise ApiRequestError(503, message, code="unavailable")

    def _silence_s(self, client: Client) -> float:
        return self._settings.silence_s if client.silence_s is None else client.silence_s

    def _client(self, request: Request) -> Client:
        if self.keys.refresh(time.monotonic()):
            self._rate_limiter.keep(self.keys.digests)
        client = self.keys.client_of(request.headers.get("Authorization", ""), request.headers.get("x-api-key", ""))
        if client is None:
            raise ApiRequestError(401, "A valid API key is needed.", code="invalid_api_key")
        return client


async def _keep_within(proxy: Proxy, context: RequestContext) -> None:
    """Exclude the instances that the proxy does not allow. Raises ApiRequestError if none is left. Mutates `context`."""
    if not proxy.restricts:
        return
    instances = context.state.pool.instances
    before = set(context.placement.exclude)
    found = set(await proxy.excluded([target_of(instance) for instance in instances]))
    context.placement.exclude.extend(sorted(found - before))
    if instances and all(instance.instance_id in found or instance.instance_id in before for instance in instances):
        raise ApiRequestError(503, "No instance is ready that may be chosen.", code="no_instance")


def _tell_limits(request: Request, error_format: ErrorFormat, status: LimitStatus) -> None:
    """Add the header fields with the key's remaining limits to the request's answer, in the format of its API."""
    if error_format is ErrorFormat.ANTHROPIC:
        request.answer_fields |= anthropic_fields(status, datetime.now(UTC))
    else:
        request.answer_fields |= openai_fields(status)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(body), {**JSON_FIELDS})


def _error_format(request: Request) -> ErrorFormat:
    return error_format_of(request.path, by_anthropic="anthropic-version" in request.headers)


def _write_error(request: Request, answer: Response) -> None:
    """End an opened stream with the event that tells the client of `answer`, which is an error."""
    request.writer.write(as_event(answer, _error_format(request)))
    request.writer.end()


def _error(error: ApiRequestError, error_format: ErrorFormat) -> Response:
    return Response(error.status, error.body(error_format), JSON_FIELDS | error.headers())


def _identified(answer: Response, error_format: ErrorFormat, request_id: str | None) -> Response:
    """Return `answer`; one that is an error in Anthropic's format with the id of its request. Mutates `answer`."""
    if error_format is ErrorFormat.ANTHROPIC and answer.status >= 400:
        answer.body = with_request_id(answer.body, request_id)
    return answer


def _unknown_model(name: str) -> ApiRequestError:
    return ApiRequestError(404, f"The model `{name}` does not exist.", param="model", code="model_not_found")
