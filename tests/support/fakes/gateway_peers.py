"""A fake router and fake engines for gateway tests, over real sockets. They behave as scripted and record all messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from aiohttp import web

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2, placement_pb2_grpc
from pointsman_common.core.block_keys import KEY_SCHEME
from pointsman_common.io.channel import SERVER_OPTIONS
from pointsman_gateway.core.api import Endpoint, parse
from pointsman_gateway.core.pool_state import TokenizerStatus
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.render_budget import Unrenderable
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_gateway.io.tokenizer_files import load_tokenizer
from tests.support.fakes.engine_answers import MODEL as MODEL
from tests.support.fakes.engine_answers import Script
from tests.support.fleet_updates import fleet_update
from tests.support.tiny_tokenizer import CHATML, make_tokenizer
from tests.support.waiting import eventually

# Event with which a vLLM begins a chat, and the one with which it aborts a generation when it is told to stop.
BEGUN = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
EMBEDDING = b"\x00\x00\x00?\x00\x00\x00\xbf"  # 0.5 and -0.5
GIVEN_UP = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n'
# The events with which it aborts Messages, which tell no other reason for their end.
NO_REASON = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":null},"usage":{}}\n\n'
NO_REASON += b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@dataclass
class FakeEngine:
    """An engine that answers a scripted text. `mode` is one of:

    - ok, 400, 500, 501, 503
    - hang: no request is answered
    - 200: each answer is 200 with an error object
    - page: each answer is 200 with a page of HTML, under the content type of the right answer
    - cut: the connection is closed in the middle of a stream
    - short: a stream ends without [DONE]
    - linger: a stream does not end after [DONE]
    - told, broken: as confess and cut, before the first word
    - confess: after the first word the stream reports an internal error, in OpenAI's format as vLLM does on every API
    - stopped: generations are aborted, as by a vLLM that was told to stop; a stream is aborted at once, or with `hold` after its
      first word and without an end
    """

    tokenizer: ModelTokenizer
    mode: str = "ok"
    words: tuple[str, ...] = ("The ", "points ", "are ", "set.")
    url: str = ""
    token_shift: int = 0
    cached: Callable[[dict[str, Any]], int] = lambda _: 16  # cached tokens of a body's prompt
    hold: asyncio.Event | None = None  # a stream waits here after its first word
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    engine_id: str = "e1"  # of the KV connector
    queries: int = 0
    stored: dict[str, dict[str, Any]] = field(default_factory=dict)  # responses by id
    unloaded: set[str] = field(default_factory=set)  # names of models that it does not know
    aborted: int = 0
    open: int = 0
    _site: web.TCPSite = field(init=False, repr=False)

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            ids = self.tokenizer.chat(body)
        else:
            ids = self.tokenizer.text(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        return web.json_response({"tokens": [token + self.token_shift for token in ids], "count": len(ids)})

    async def query(self, request: web.Request) -> web.Response:
        """Answer as Mooncake's bootstrap server does."""
        self.queries += 1
        if not self.engine_id:
            return web.Response(status=503)
        return web.json_response({"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        self.requests.append((request.path, body, dict(request.headers)))
        if self.mode in ("500", "501", "503"):
            error = {"message": f"boom at 10.0.0.7 for {body.get('user')}", "type": "InternalServerError", "code": 500}
            return web.json_response({"error": error}, status=int(self.mode), headers={"Retry-After": "3"})
        if body["model"] in self.unloaded:
            error = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        if self.mode == "200":
            return web.json_response({"error": {"message": "no", "type": "ServerError", "code": 500}})
        if self.mode == "400":
            return web.json_response({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, status=400)
        self.open += 1
        try:
            if self.mode == "hang":
                await asyncio.sleep(3600)
            if self.mode == "page":
                media_type = "text/event-stream" if body.get("stream") else "application/json"
                return web.Response(body=b"<html>Log in</html>", content_type=media_type)
            kind = Endpoint(request.path)
            call = parse(kind, raw)
            try:
                count = len(self.tokenizer.prompt(call).ids) if kind.generates else 9
            except Unrenderable:
                count = 9
            if body.get("encoding_format") in ("bytes", "bytes_only"):
                return _in_bytes(body["encoding_format"])
            script = Script(kind, body, self.words, count, self.cached(body))
            if kind is Endpoint.RESPONSES:
                if (before := body.get("previous_response_id", "")) not in ("", *self.stored):
                    return _not_stored(before)
                self.stored[body.get("request_id", "")] = script.whole()
            if not body.get("stream"):
                whole = script.whole()
                if self.mode == "stopped" and kind is Endpoint.MESSAGES:
                    del whole["stop_reason"]
                elif self.mode == "stopped":
                    whole["choices"][0]["finish_reason"] = "abort"
                return web.json_response(whole)
            return await self._stream(request, script)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.open -= 1

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Server": "secret"})
        await answer.prepare(request)
        before, words, after = script.events()
        if self.mode == "stopped" and self.hold is None:
            messages = script.kind is Endpoint.MESSAGES
            words = [b"".join([*before, NO_REASON if messages else GIVEN_UP])]
            before, after = [], [] if messages else after
        for event in before:
            await answer.write(event)
        if self.mode in ("told", "broken"):
            if script.kind is Endpoint.CHAT:
                await answer.write(BEGUN)
            return await _confess(answer, script.kind) if self.mode == "told" else _cut(request, answer)
        for at, event in enumerate(words):
            await answer.write(event)
            if at == 0 and self.hold is not None:
                await self.hold.wait()
            if at == 0 and self.mode == "stopped" and self.hold is not None:
                await answer.write(GIVEN_UP)
                await asyncio.sleep(3600)
            if at == 0 and self.mode == "short":
                return answer
            if at == 0 and self.mode == "confess":
                return await _confess(answer, script.kind)
            if at == 0 and self.mode == "cut":
                return _cut(request, answer)
        for event in after:
            await answer.write(event)
        if self.mode == "linger":
            await asyncio.sleep(3600)
        return answer

    async def aside(self, request: web.Request) -> web.Response:
        """Answer a request that an engine's HTTP server answers by itself, without a generation."""
        body = await request.json()
        self.requests.append((request.path, body, dict(request.headers)))
        await self._hang()
        if self.mode == "500":
            return web.Response(status=500, text="boom at 10.0.0.7")
        if self.mode == "503":
            return _scaling()
        return web.json_response({"input_tokens": 9} if "messages" in body else {"prompt": "x"})

    async def _hang(self) -> None:
        if self.mode == "hang":
            self.open += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.open -= 1

    async def stored_response(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path_qs, {}, dict(request.headers)))
        await self._hang()
        if self.mode == "503":
            return _scaling()
        found = self.stored.get(request.match_info["id"])
        if found is None:
            return _not_stored(request.match_info["id"])
        if request.query.get("stream") == "true":
            return await self._stream(request, Script(Endpoint.RESPONSES, found, self.words, 9))
        cancelled = {"status": "cancelled"} if request.path.endswith("/cancel") else {}
        return web.json_response(found | cancelled)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeEngine]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/query", self.query)
        for kind in Endpoint:
            if kind is not Endpoint.TOKENIZE:
                app.router.add_post(kind.value, self.generate if kind.is_placed else self.aside)
        app.router.add_get("/v1/responses/{id}", self.stored_response)
        app.router.add_post("/v1/responses/{id}/cancel", self.stored_response)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self._site = web.TCPSite(runner, "127.0.0.1", 0)
        await self._site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def stop_listening(self) -> None:
        """Stop accepting connections; open ones stay."""
        await self._site.stop()


@dataclass
class Prefilling(FakeEngine):
    """A stream begins with what vLLM sends before the prompt is computed, and waits for `gate`; in mode "cut" its connection is
    closed then."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    prefilling: int = 0  # streams that have begun

    async def _stream(self, request: web.Request, script: Script) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        before, words, after = script.events()
        # Other APIs have nothing of this kind, but for the comments of --sse-keep-alive-interval.
        await answer.write(before.pop(0) if script.kind is Endpoint.RESPONSES else b": keep-alive\n\n")
        self.prefilling += 1
        await self.gate.wait()
        if self.mode == "cut":
            return _cut(request, answer)
        for event in [*before, *words, *after]:
            await answer.write(event)
        return answer


def _scaling() -> web.Response:
    error = {"message": "scaling at 10.0.0.7", "type": "ServiceUnavailableError", "code": 503}
    return web.json_response({"error": error}, status=503, headers={"Retry-After": "3"})


def _in_bytes(encoding: str) -> web.Response:
    """Return two float32 as vLLM answers with embeddings that are not encoded: its usage is in a header, or nowhere."""
    metadata = {"id": "embd-1", "data": [{"index": 0, "start": 0, "end": 8}], "usage": {"prompt_tokens": 9}}
    headers = {"metadata": json.dumps(metadata)} if encoding == "bytes" else None
    return web.Response(body=EMBEDDING, content_type="application/octet-stream", headers=headers)


async def _confess(answer: web.StreamResponse, kind: Endpoint) -> web.StreamResponse:
    error = {"message": "boom at 10.0.0.7:5557", "type": "InternalServerError", "param": None, "code": 500}
    await answer.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    if kind in (Endpoint.CHAT, Endpoint.COMPLETION):
        await answer.write(b"data: [DONE]\n\n")
    return answer


def _cut(request: web.Request, answer: web.StreamResponse) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return answer


def _not_stored(id_: str) -> web.Response:
    error = {"message": f"Response with id '{id_}' not found.", "type": "invalid_request_error"}
    return web.json_response({"error": error | {"param": "response_id", "code": 404}}, status=404)


Placer = Callable[[placement_pb2.PlacementRequest], placement_pb2.Placement | placement_pb2.Refusal | None]


class FakeRouter(placement_pb2_grpc.PlacementServiceServicer, fleet_pb2_grpc.FleetServiceServicer):
    """A router that places on the first instance that is not excluded, or by `placer`. Records every message by kind."""

    def __init__(self, pools: list[placement_pb2.Pool]) -> None:
        self.pools = pools
        self.starting = False  # whether it does not know the fleet yet
        self.placer: Placer = self.first
        self.draining: set[str] = set()
        # What follows the steps of any request, and of those with these ids.
        self.next_steps: list[placement_pb2.Placement | placement_pb2.Refusal] = []
        self.plans: dict[str, list[placement_pb2.Placement | placement_pb2.Refusal]] = {}
        self.after_failure: Callable[[placement_pb2.StepDone], placement_pb2.Placement] | None = None
        self.late = False  # whether the answer to a step's end is sent only after the request's end
        self._held: list[placement_pb2.Placement] = []
        self.hellos: list[placement_pb2.GatewayHello] = []
        self.places: list[placement_pb2.PlacementRequest] = []
        self.first_tokens: list[placement_pb2.FirstToken] = []
        self.step_dones: list[placement_pb2.StepDone] = []
        self.open_streams: list[placement_pb2.OpenStream] = []
        self.finished: list[placement_pb2.Finished] = []
        self.explained: list[placement_pb2.PlacementRequest] = []
        self.ended_sessions: list[tuple[str, str]] = []  # tenant and id
        self.confirms_ends = True
        self.order: list[str] = []  # the kinds of all messages, without hellos
        self.reserved: set[str] = set()  # ids of requests that are announced or placed, and not finished
        self.metadata: dict[str, str] = {}
        self.address = ""
        self.changed = asyncio.Condition()
        # By stream: the fleet that was sent last.
        self._sessions: dict[asyncio.Queue[placement_pb2.SessionResponse | None], placement_pb2.Fleet] = {}
        self._server: grpc.aio.Server | None = None

    async def tell_fleet(self) -> None:
        """Send all gateways the changes of `pools`."""
        fleet = placement_pb2.Fleet(pools=self.pools, starting=self.starting)
        for session, sent in self._sessions.items():
            self._sessions[session] = fleet
            await session.put(placement_pb2.SessionResponse(fleet_update=fleet_update(sent, fleet)))

    async def move(self, request_id: str, reason: placement_pb2.MoveReason.ValueType, *, unbegun: bool = False) -> None:
        """Ask for a request to leave i0, which takes no more if it drains. `unbegun`: unless its answer has begun."""
        if reason == placement_pb2.MOVE_REASON_DRAIN:
            self.draining.add("i0")
        move = placement_pb2.Move(request_id=request_id, reason=reason, unbegun=unbegun)
        for session in self._sessions:
            await session.put(placement_pb2.SessionResponse(move=move))

    async def park(self, request_id: str, bound_s: int) -> None:
        """Report that a request is parked."""
        parked = placement_pb2.Parked(request_id=request_id)
        parked.bound.FromSeconds(bound_s)
        for session in self._sessions:
            await session.put(placement_pb2.SessionResponse(parked=parked))

    async def refuse(self, request_id: str, code: int, message: str, *, wait_s: int = 0, place: int = 0) -> None:
        """Refuse a request that `placer` has left without an answer. `place`: its place among parked ones."""
        refused = placement_pb2.Refusal(request_id=request_id, code=code, message=message, place=place)
        if wait_s:
            refused.retry_after.FromSeconds(wait_s)
        for session in self._sessions:
            await session.put(placement_pb2.SessionResponse(refusal=refused))

    def first(self, request: placement_pb2.PlacementRequest) -> placement_pb2.Placement | placement_pb2.Refusal:
        pool = next(
            (pool for pool in self.pools if request.model in (pool.model, *pool.served_names, *pool.lora_names)), None
        )
        not_these = {*request.exclude, *self.draining}
        ready = [instance for instance in pool.instances if instance.instance_id not in not_these] if pool else []
        if not ready:
            return refusal(request, 14, "no instance")
        return serve(request, ready[0])

    async def Session(self, requests: AsyncIterator[placement_pb2.SessionRequest], context: Any) -> AsyncIterator[Any]:
        self.metadata = dict(context.invocation_metadata())
        batch_queue: asyncio.Queue[placement_pb2.SessionResponse | None] = asyncio.Queue()

        async def read() -> None:
            async for message in requests:
                for request in message.batch.requests if message.HasField("batch") else (message,):
                    await self._take(request, batch_queue)
            await batch_queue.put(None)

        reader = asyncio.create_task(read())
        try:
            while (answer := await batch_queue.get()) is not None:
                yield answer
        finally:
            self._sessions.pop(batch_queue, None)
            reader.cancel()

    async def _take(self, message: placement_pb2.SessionRequest, batch_queue: asyncio.Queue[Any]) -> None:
        answer: Any = None
        if not message.HasField("hello"):
            self.order.append(message.WhichOneof("kind") or "")
        match message.WhichOneof("kind"):
            case "hello":
                self.hellos.append(message.hello)
                self.reserved = {stream.request.request_id for stream in message.hello.open_streams}
                welcome = placement_pb2.GatewayWelcome(router_id="fake", epoch=1, key_scheme=KEY_SCHEME)
                await batch_queue.put(placement_pb2.SessionResponse(welcome=welcome))
                fleet = self._sessions[batch_queue] = placement_pb2.Fleet(pools=self.pools, starting=self.starting)
                await batch_queue.put(placement_pb2.SessionResponse(fleet=fleet))
            case "place":
                self.places.append(message.place)
                answer = self.placer(message.place)
                if isinstance(answer, placement_pb2.Placement):
                    self.reserved.add(message.place.request_id)
            case "step_done":
                self.step_dones.append(message.step_done)
                if not message.step_done.ok and self.after_failure is not None:
                    answer = self.after_failure(message.step_done)
                else:
                    answer = self.plans.get(message.step_done.request_id, self.next_steps).pop(0)
                answer.request_id = message.step_done.request_id
                if self.late:
                    self._held.append(answer)
                    answer = None
            case "open_stream":
                self.open_streams.append(message.open_stream)
                self.reserved.add(message.open_stream.request.request_id)
            case "first_token":
                self.first_tokens.append(message.first_token)
            case "finished":
                self.finished.append(message.finished)
                self.reserved.discard(message.finished.request_id)
                answer = self._held.pop() if self._held else None
            case "end_session":
                end = message.end_session
                self.ended_sessions.append((end.tenant, end.session_id))
                if self.confirms_ends:
                    models = [pool.model for pool in self.pools]
                    ended = placement_pb2.SessionEnded(tenant=end.tenant, session_id=end.session_id, models=models)
                    await batch_queue.put(placement_pb2.SessionResponse(session_ended=ended))
        if isinstance(answer, placement_pb2.Placement):
            await batch_queue.put(placement_pb2.SessionResponse(placement=answer))
        elif answer is not None:
            await batch_queue.put(placement_pb2.SessionResponse(refusal=answer))
        async with self.changed:
            self.changed.notify_all()

    async def Explain(self, request: fleet_pb2.ExplainRequest, context: Any) -> fleet_pb2.ExplainResponse:
        self.explained.append(request.request)
        decision = fleet_pb2.Decision(
            decision_id="d-1", reason="session_affinity", input_tokens=request.request.input_tokens
        )
        return fleet_pb2.ExplainResponse(decision=decision)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds()`, checked after every message, without a timeout other than the test's."""
        async with self.changed:
            await self.changed.wait_for(holds)

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        placement_pb2_grpc.add_PlacementServiceServicer_to_server(self, self._server)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
            # Tasks that gRPC has cancelled still have to end in this event loop.
            await eventually(lambda: not self._sessions, "gateways' streams are over")
            await asyncio.sleep(0)


def serve(request: placement_pb2.PlacementRequest, instance: placement_pb2.InstanceRef) -> placement_pb2.Placement:
    step = placement_pb2.Step(kind=placement_pb2.STEP_KIND_SERVE, instance=instance, reason="test")
    return placement_pb2.Placement(
        request_id=request.request_id, decision_id=f"d-{request.request_id}", step=step, last=True
    )


def refusal(request: placement_pb2.PlacementRequest, code: int, message: str, wait_s: int = 0) -> placement_pb2.Refusal:
    answer = placement_pb2.Refusal(request_id=request.request_id, code=code, message=message)
    if wait_s:
        answer.retry_after.FromSeconds(wait_s)
    return answer


@dataclass
class Peers:
    """A fake router and fake engines."""

    router: FakeRouter
    engines: list[FakeEngine]


@dataclass
class Stack(Peers):
    """Peers with a gateway."""

    url: str
    gateway: Any


def fake_router(pools: list[placement_pb2.Pool]) -> FakeRouter:
    """Make a router that answers UNIMPLEMENTED to the calls that gateways do not make."""
    return FakeRouter(pools)  # type: ignore[abstract]


@asynccontextmanager
async def peers(
    folder: Path, engines: int, template: str = CHATML, engine: type[FakeEngine] = FakeEngine, max_model_len: int = 4096
) -> AsyncIterator[Peers]:
    """Run engines and a router that knows them. The files of their model are in `folder`/model."""
    tokenizer = load_tokenizer(make_tokenizer(folder / "model", template))
    servers = [engine(tokenizer) for _ in range(engines)]
    contexts = [server.serve() for server in servers]
    for context in contexts:
        await context.__aenter__()
    refs = [
        placement_pb2.InstanceRef(instance_id=f"i{at}", url=server.url, incarnation="1")
        for at, server in enumerate(servers)
    ]
    pool = placement_pb2.Pool(
        model=MODEL,
        served_names=["tiny-alias"],
        lora_names=["tiny-lora"],
        model_root=str(folder / "model"),
        max_model_len=max_model_len,
        instances=refs,
    )
    router = fake_router([pool])
    await router.start()
    try:
        yield Peers(router, servers)
    finally:
        await router.stop()
        for context in contexts:
            await context.__aexit__(None, None, None)


@asynccontextmanager
async def stack(
    folder: Path,
    engines: int = 2,
    *,
    ready: bool = True,
    template: str = CHATML,
    engine: type[FakeEngine] = FakeEngine,
    max_model_len: int = 4096,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Run engines, router and gateway. Wait until the tokenizer is checked, unless `ready` is False."""
    async with (
        peers(folder, engines, template, engine, max_model_len) as up,
        gateway_before(up, **settings) as (gateway, url),
    ):
        if ready:
            await until_ready(gateway)
        yield Stack(up.router, up.engines, url, gateway)


@asynccontextmanager
async def gateway_before(up: Peers, **settings: Any) -> AsyncIterator[tuple[Any, str]]:
    """Run a gateway in this process that uses `up`'s router; yield the gateway and its URL."""
    given: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "routers": [up.router.address],
        "drain_timeout_s": 0.5,
        "router_grace_s": 0.2,
    } | settings
    async with serving(GatewaySettings(**given)) as (gateway, url):
        yield gateway, url


async def until_ready(gateway: Any) -> None:
    """Wait until the tokenizer of every pool is found to be exact, or not."""

    def checked() -> bool:
        states = gateway.pools.states()
        return bool(states) and all(state.tokenizer_status is not TokenizerStatus.CHECKING for state in states)

    await eventually(checked)
