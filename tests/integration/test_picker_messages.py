"""The messages of an endpoint picker, one by one, without a proxy: their order, and what is answered to each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pointsman.gateway.v1 import ext_proc_pb2 as pb
from pointsman.router.v1 import placement_pb2
from pointsman_common.io.channel import END_OF_STREAM
from pointsman_gateway.io.ext_proc import proxy_stream
from pointsman_gateway.io.ext_proc.outgoing import Outgoing
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.settings import GatewaySettings
from tests.support.fakes.gateway_peers import MODEL, Stack, gateway_before, peers, stack, until_ready
from tests.support.repository import REPOSITORY
from tests.support.waiting import eventually

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHAT = json.dumps(
    {"model": MODEL, "messages": [{"role": "user", "content": "Set the points."}], "stream": True}
).encode()
DUPLEX = pb.ProtocolConfiguration(
    request_body_mode=pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED, response_body_mode=pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
)


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(tmp_path, ext_proc_listen="127.0.0.1:0", first_byte_timeout_s=2.0) as running:
        yield running
        await eventually(lambda: not running.router.reserved, "nothing is reserved")
        assert running.gateway.router.open_count == 0


class Proxy:
    """A proxy's end of one stream."""

    def __init__(self, up: Stack) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{up.gateway.ext_proc_port}")
        self._call: Any = self._channel.stream_stream(
            PROCESS, lambda message: message.SerializeToString(), pb.ProcessingResponse.FromString
        )(None)

    async def __aenter__(self) -> Proxy:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        await self._channel.close(None)

    async def send(self, *messages: pb.ProcessingRequest) -> None:
        """Send messages."""
        for message in messages:
            await self._call.write(message)

    async def end(self) -> None:
        """Send nothing more."""
        await self._call.done_writing()

    async def read(self) -> pb.ProcessingResponse:
        """Return the next message."""
        message = await self._call.read()
        assert isinstance(message, pb.ProcessingResponse), "the picker has ended the stream"
        return message

    async def read_all(self) -> list[pb.ProcessingResponse]:
        """Return all messages up to the end of the stream."""
        found = []
        while (message := await self._call.read()) is not END_OF_STREAM:
            found.append(message)
        return found


def header_map(fields: dict[str, str]) -> pb.HeaderMap:
    return pb.HeaderMap(
        headers=[pb.HeaderValue(key=name, raw_value=value.encode("latin-1")) for name, value in fields.items()]
    )


def head(
    fields: Mapping[str, str] | None = None, *, end: bool = False, subset: Sequence[str] | None = None, **more: str
) -> pb.ProcessingRequest:
    every = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
    every |= {**(fields or {}), **{name.replace("_", "-"): value for name, value in more.items()}}
    message = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=header_map(every), end_of_stream=end), protocol_config=DUPLEX
    )
    if subset is not None:
        hint = Struct()
        hint.update({"x-gateway-destination-endpoint-subset": list(subset)})
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    return message


def body(piece: bytes = CHAT, *, end: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=piece, end_of_stream=end))


def answer_head(status: int | str = 200, end: bool = False, **fields: str) -> pb.ProcessingRequest:
    every = {":status": str(status), "content-type": "text/event-stream", "x-envoy-upstream-service-time": "1"} | fields
    headers = header_map({name: value for name, value in every.items() if value})
    return pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=headers, end_of_stream=end))


def answer_body(piece: bytes, *, end: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=piece, end_of_stream=end))


def trailers() -> pb.HttpTrailers:
    return pb.HttpTrailers(trailers=header_map({"x-checksum": "1"}))


def set_fields(mutation: pb.HeaderMutation) -> dict[str, str]:
    return {header.header.key: header.header.raw_value.decode() for header in mutation.set_headers}


async def placed(proxy: Proxy) -> tuple[pb.ProcessingResponse, bytes]:
    """Read up to the end of the request's body; return the answer to its head, and the body."""
    to, sent = await proxy.read(), b""
    while True:
        piece = (await proxy.read()).request_body.response.body_mutation.streamed_response
        sent += piece.body
        if piece.end_of_stream:
            return to, sent


async def outcomes(up: Stack) -> list[int]:
    """Wait until a request has ended; return the outcomes of all."""
    await up.router.until(lambda: bool(up.router.finished))
    return [finish.outcome for finish in up.router.finished]


WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def test_a_request_and_its_answer(up: Stack) -> None:
    """The head waits for the body; its answer comes first, with header and metadata alike."""
    async with Proxy(up) as proxy:
        await proxy.send(head(user_agent="x", x_request_id="mine"), body(CHAT[:20], end=False), body(CHAT[20:]))
        to, sent = await placed(proxy)
        common = to.request_headers.response
        fields = set_fields(common.header_mutation)
        endpoints = ",".join(engine.url.removeprefix("http://") for engine in up.engines)
        assert fields["x-gateway-destination-endpoint"] == endpoints
        metadata: dict[str, Any] = dict(to.dynamic_metadata)
        assert metadata["envoy.lb"]["x-gateway-destination-endpoint"] == endpoints
        assert fields["x-request-id"] == "mine"
        assert "user-agent" in common.header_mutation.remove_headers
        assert all(header.append_action == 2 for header in common.header_mutation.set_headers)
        assert json.loads(sent)["stream_options"] == {"include_usage": True}
        assert up.router.first_tokens == []
        await proxy.send(answer_head(server="secret"), answer_body(WORD[:10]))
        await proxy.send(answer_body(WORD[10:] + DONE, end=True))
        began, *rest = await proxy.read_all()
        assert "server" in began.response_headers.response.header_mutation.remove_headers
        pieces = [message.response_body.response.body_mutation.streamed_response for message in rest]
        assert b"".join(piece.body for piece in pieces) == WORD + DONE
        assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert await outcomes(up) == [1]


@pytest.mark.parametrize(("status", "outcome"), [(200, 1), (503, 4)])
async def test_a_proxy_that_does_not_tell_how_long_an_engine_took(up: Stack, status: int, outcome: int) -> None:
    async with Proxy(up) as proxy:
        await proxy.send(head(), body())
        await placed(proxy)
        quiet: dict[str, Any] = {"x-envoy-upstream-service-time": ""}
        await proxy.send(answer_head(status, **quiet), answer_body(WORD + DONE, end=True))
        began, *_ = await proxy.read_all()
        fields = set_fields(began.response_headers.response.header_mutation)
        assert fields.get(":status", "200") == ("200" if status == 200 else "502")
    assert await outcomes(up) == [outcome]


async def test_trailers_in_both_directions(up: Stack) -> None:
    async with Proxy(up) as proxy:
        await proxy.send(head(), body(end=False), pb.ProcessingRequest(request_trailers=trailers()))
        await proxy.read()
        assert not (await proxy.read()).request_body.response.body_mutation.streamed_response.end_of_stream
        assert (await proxy.read()).WhichOneof("response") == "request_trailers"
        await proxy.send(answer_head(), answer_body(WORD + DONE), pb.ProcessingRequest(response_trailers=trailers()))
        *_, last = await proxy.read_all()
        assert last.WhichOneof("response") == "response_trailers"
    assert await outcomes(up) == [1]


async def test_a_request_without_a_body_gets_its_response_at_once(up: Stack) -> None:
    async with Proxy(up) as proxy:
        await proxy.send(head({":method": "GET", ":path": "/v1/models"}, end=True))
        [answer] = await proxy.read_all()
        assert answer.immediate_response.status.code == 200
        assert json.loads(answer.immediate_response.body)["data"][0]["id"] == MODEL
        assert set_fields(answer.immediate_response.headers)["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("messages", "status", "code"),
    [
        pytest.param([body()], 500, "messages_out_of_order", id="a body first"),
        pytest.param([answer_head()], 500, "messages_out_of_order", id="an answer first"),
        pytest.param([pb.ProcessingRequest()], 500, "messages_out_of_order", id="nothing"),
        pytest.param([head(), head()], 500, "messages_out_of_order", id="two heads"),
        pytest.param([head(), answer_head()], 500, "messages_out_of_order", id="an answer before the body's end"),
        pytest.param([head(), body(), body()], 500, "messages_out_of_order", id="a body after its end"),
        pytest.param([head(), body(), answer_body(b"x")], 500, "messages_out_of_order", id="an answer without a head"),
        pytest.param(
            [head(), body(), answer_head("")],
            500,
            "messages_out_of_order",
            id="an answer without a status",
        ),
        pytest.param([head(), body(), answer_head("²")], 500, "messages_out_of_order", id="no number of a status"),
        pytest.param([head(), body(b"{")], 400, "invalid_json", id="not JSON"),
        pytest.param([head(), body(b"")], 400, "invalid_json", id="an empty body"),
        pytest.param([head(end=True)], 400, "invalid_json", id="no body"),
        pytest.param([head(content_type="text/plain")], 415, "unsupported_media_type", id="no JSON by its type"),
        pytest.param([head({":path": "/nothing"})], 404, "not_found", id="an unknown path"),
        pytest.param([head({":method": "PUT"})], 405, "method_not_allowed", id="another method"),
        pytest.param([head({":path": "", ":method": ""})], 404, "not_found", id="no path"),
        pytest.param([head(), body(CHAT.replace(b"tiny", b"other"))], 404, "model_not_found", id="an unknown model"),
        pytest.param([head(subset=[]), body()], 503, "no_instance", id="an empty subset"),
        pytest.param([head(subset=["10.0.0.1:1"]), body()], 503, "no_instance", id="a subset of others"),
    ],
)
async def test_what_is_wrong_is_answered_at_once(
    up: Stack, messages: list[pb.ProcessingRequest], status: int, code: str
) -> None:
    async with Proxy(up) as proxy:
        await proxy.send(*messages)
        *_, answer = await proxy.read_all()
        assert answer.immediate_response.status.code == status
        assert json.loads(answer.immediate_response.body)["error"]["code"] == code
    await eventually(lambda: not up.router.reserved)


async def test_an_answer_after_its_end_breaks_the_stream_off(up: Stack) -> None:
    async with Proxy(up) as proxy:
        await proxy.send(head(), body())
        await placed(proxy)
        await proxy.send(answer_head(), answer_head())
        _, *rest = await proxy.read_all()
        pieces = [message.response_body.response.body_mutation.streamed_response for message in rest]
        assert b"messages_out_of_order" in b"".join(piece.body for piece in pieces)
    assert await outcomes(up) == [2]


async def test_a_head_without_a_body_of_an_engine(up: Stack) -> None:
    async with Proxy(up) as proxy:
        await proxy.send(head(), body())
        await placed(proxy)
        await proxy.send(answer_head(404, end=True))
        *_, answer = await proxy.read_all()
        assert answer.immediate_response.status.code == 404
        assert json.loads(answer.immediate_response.body)["error"]
    assert await outcomes(up) == [3]


async def test_a_proxy_that_gives_up_before_it_has_an_endpoint(up: Stack) -> None:
    """Its own timeout has passed: it sends the head of its own answer."""
    up.router.placer = lambda _: None
    async with Proxy(up) as proxy:
        await proxy.send(head(), body())
        await up.router.until(lambda: bool(up.router.places))
        await proxy.send(answer_head(504))
        assert await proxy.read_all() == []
    assert await outcomes(up) == [2]


async def test_requests_that_wait_at_a_router_that_is_lost(up: Stack) -> None:
    """As for the gateway's own clients: placed without a router, except for a parked one, which waits within its bound."""
    up.router.placer = lambda _: None
    async with Proxy(up) as held, Proxy(up) as parked:
        await held.send(head(), body())
        await up.router.until(lambda: len(up.router.places) == 1)
        await parked.send(head(), body())
        await up.router.until(lambda: len(up.router.places) == 2)
        waiting = up.router.places[1].request_id
        await up.router.park(waiting, 1)
        await eventually(
            lambda: up.gateway.router._requests[waiting].parked_until, "the gateway knows that it is parked"
        )
        await up.router.stop()
        to, _ = await placed(held)
        assert "x-gateway-destination-endpoint" in set_fields(to.request_headers.response.header_mutation)
        (answer,) = await parked.read_all()
        assert answer.immediate_response.status.code == 503
        assert set_fields(answer.immediate_response.headers)["retry-after"] == "1"
        await held.end()
        await eventually(lambda: up.gateway.router.open_count == 0, "nothing is open")


@pytest.mark.parametrize(
    "when", ["in the head", "in the body", "while it is placed", "before an answer", "in an answer"]
)
@pytest.mark.parametrize("how", ["cancels", "ends"])
async def test_a_stream_that_ends_leaves_nothing(up: Stack, when: str, how: str) -> None:
    if when == "while it is placed":
        up.router.placer = lambda _: None
    async with Proxy(up) as proxy:
        if when != "in the head":
            await proxy.send(head(), body(end=when != "in the body"))
        if when == "while it is placed":
            await up.router.until(lambda: bool(up.router.places))
        if when in ("before an answer", "in an answer"):
            await placed(proxy)
        if when == "in an answer":
            await proxy.send(answer_head(), answer_body(WORD))
            await up.router.until(lambda: bool(up.router.first_tokens))
        if how == "ends":
            await proxy.end()
            await proxy.read_all()
    if when not in ("in the head", "in the body"):
        assert await outcomes(up) == [2]
    await eventually(lambda: not up.gateway.proxy_streams)


async def test_a_stream_that_ends_while_a_message_is_being_sent_gets_its_status(
    up: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC sends no status behind a message whose sending was given up: the stream would never end for the proxy."""
    slow, goes_on, given_up = asyncio.Event(), asyncio.Event(), []

    class Slow(Outgoing):
        def __init__(self, write: Callable[[pb.ProcessingResponse], Awaitable[None]]) -> None:
            async def slowly(message: pb.ProcessingResponse) -> None:
                try:
                    if message.HasField("response_body"):
                        slow.set()
                        await goes_on.wait()
                    await write(message)
                except asyncio.CancelledError:
                    given_up.append(message)
                    raise

            super().__init__(slowly)

    monkeypatch.setattr(proxy_stream, "Outgoing", Slow)
    async with Proxy(up) as proxy:
        await proxy.send(head(), body())
        await placed(proxy)
        await proxy.send(answer_head(), answer_body(WORD), answer_body(WORD))
        await asyncio.wait_for(slow.wait(), 20)
        await proxy.end()
        await eventually(lambda: up.router.finished, "the end is told")
        goes_on.set()
        await asyncio.wait_for(proxy.read_all(), 20)
    assert not given_up
    await eventually(lambda: not up.gateway.proxy_streams)


async def test_any_messages_in_any_order_leave_nothing(up: Stack) -> None:
    rng = random.Random(11)
    every = [
        head(), head(end=True), head(subset=[]), body(), body(b"{"), body(b"", end=False), answer_head(), answer_head(503),
        answer_head(end=True), answer_body(WORD), answer_body(DONE, end=True), answer_body(b""), pb.ProcessingRequest(),
        pb.ProcessingRequest(request_trailers=trailers()), pb.ProcessingRequest(response_trailers=trailers()),
    ]  # fmt: skip
    begins = [[], [head()], [head(), body()], [head(), body(), answer_head()]]

    async def one() -> None:
        async with Proxy(up) as proxy:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for message in [*rng.choice(begins), *rng.choices(every, k=rng.randint(0, 4))]:
                    await proxy.send(message)
                    await asyncio.sleep(rng.choice([0.0, 0.0, 0.02]))
                await proxy.end()
                await proxy.read_all()

    async with asyncio.timeout(60):
        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(20)))
    await eventually(lambda: not up.gateway.proxy_streams, "no stream is open")
    # A placement that arrives after the end of its request is given back, too.
    ended = [finish.request_id for finish in up.router.finished if finish.error != "the placement came too late"]
    assert len(ended) == len(set(ended)) > 20


async def test_an_instance_that_does_not_answer_in_time(up: Stack) -> None:
    async with Proxy(up) as proxy:
        await proxy.send(head(), body())
        await placed(proxy)
        [answer] = await proxy.read_all()
        assert answer.immediate_response.status.code in (502, 504)
    assert await outcomes(up) == [4]


@pytest.mark.parametrize("lost", [False, True])
async def test_a_silent_answer_fails(tmp_path: Path, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After idle_timeout_s, or sooner if the agent of its instance is gone."""
    monkeypatch.setattr(proxy_stream, "LOST_S", 0.3)
    idle_s = 600.0 if lost else 0.5
    async with stack(tmp_path, ext_proc_listen="127.0.0.1:0", idle_timeout_s=idle_s) as up, Proxy(up) as proxy:
        await proxy.send(head(), body())
        await placed(proxy)
        await proxy.send(answer_head(), answer_body(WORD))
        await up.router.until(lambda: bool(up.router.first_tokens))
        if lost:
            await up.router.move(up.router.places[0].request_id, placement_pb2.MOVE_REASON_LOST)
        _, *rest = await proxy.read_all()
        pieces = [message.response_body.response.body_mutation.streamed_response for message in rest]
        assert b'"error"' in b"".join(piece.body for piece in pieces)
        assert await outcomes(up) == [4]


async def test_a_message_that_cannot_be_read_ends_the_stream(up: Stack) -> None:
    class Broken:
        def SerializeToString(self) -> bytes:
            return b"\xff\xff\xff"

    async with Proxy(up) as proxy:
        await proxy.send(head(), body())
        await placed(proxy)
        await proxy._call.write(Broken())
        with contextlib.suppress(grpc.aio.AioRpcError):
            await asyncio.wait_for(proxy.read_all(), 20)
    assert await outcomes(up) == [2]
    await eventually(lambda: not up.gateway.proxy_streams)


async def test_a_head_over_the_limits_is_refused(up: Stack) -> None:
    for fields in ({f"x-{at}": "1" for at in range(200)}, {"x-long": "y" * 40_000}):
        async with Proxy(up) as proxy:
            await proxy.send(head(fields))
            [answer] = await proxy.read_all()
            assert answer.immediate_response.status.code == 431


async def test_the_end_of_the_drain_is_the_end_of_all_streams(tmp_path: Path) -> None:
    """A stream whose request is not complete gets a 503, and a caller who watches the health holds nobody up."""
    async with peers(tmp_path, 1) as up, AsyncExitStack() as running:
        given = {"ext_proc_listen": "127.0.0.1:0", "drain_timeout_s": 0.5}
        gateway, url = await running.enter_async_context(gateway_before(up, **given))
        await until_ready(gateway)
        async with (
            Proxy(Stack(up.router, up.engines, url, gateway)) as proxy,
            grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ext_proc_port}") as channel,
        ):
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watching.read()
            await proxy.send(head(), body(CHAT[:5], end=False))
            await eventually(lambda: bool(gateway.proxy_streams))
            before = asyncio.get_running_loop().time()
            ending = asyncio.create_task(running.aclose())
            [answer] = await proxy.read_all()
            assert json.loads(answer.immediate_response.body)["error"]["code"] == "shutting_down"
            await ending
            assert asyncio.get_running_loop().time() - before < 8.0


async def test_a_second_signal_ends_streams_whose_proxies_do_not_read(tmp_path: Path) -> None:
    hurry = asyncio.Event()
    async with peers(tmp_path, 1) as up, AsyncExitStack() as running:
        local = "127.0.0.1:0"
        settings = GatewaySettings(listen=local, routers=[up.router.address], ext_proc_listen=local, drain_timeout_s=60)
        gateway, url = await running.enter_async_context(serving(settings, hurry=hurry))
        await until_ready(gateway)
        before = Stack(up.router, up.engines, url, gateway)
        async with Proxy(before) as proxy:
            await proxy.send(head(), body())
            await placed(proxy)
            sending = asyncio.create_task(proxy.send(answer_head(), *[answer_body(WORD * 500)] * 200))
            await eventually(lambda: any(stream.full for stream in before.gateway.proxy_streams))
            await asyncio.sleep(0.5)
            (stream,) = before.gateway.proxy_streams
            assert stream.full
            ending = asyncio.create_task(running.aclose())
            hurry.set()
            await asyncio.wait_for(ending, 15)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        assert await outcomes(before) == [2]


async def test_a_proxy_that_only_watches_reserves_nothing(up: Stack) -> None:
    async with Proxy(up) as proxy:
        message = head()
        message.observability_mode = True
        await proxy.send(message)
        assert await proxy.read_all() == []
    assert up.router.places == []


async def test_the_health_of_each_service(up: Stack) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{up.gateway.ext_proc_port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)

        for service in ("", "readiness", "liveness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            while await status(service) != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await status("another")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


_FIELDS_OF_ENVOY = """
import json
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2
from envoy.type.v3 import http_status_pb2
files = (base_pb2, external_processor_pb2, http_status_pb2)
print(json.dumps({
    name: {field.name: [field.number, field.message_type.name if field.message_type else ""] for field in message.fields}
    for file in files for name, message in file.DESCRIPTOR.message_types_by_name.items()
}))
"""


def test_the_messages_are_envoys() -> None:
    """Every field has the number and the kind of Envoy's own."""
    python = REPOSITORY / ".venv-envoy" / "bin" / "python"
    output = subprocess.run([python, "-c", _FIELDS_OF_ENVOY], capture_output=True, text=True, check=True).stdout
    theirs = json.loads(output)
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        for field in message.fields:
            kind = field.message_type.name if field.message_type else ""
            assert theirs[name][field.name] == [field.number, kind], f"{name}.{field.name}"
