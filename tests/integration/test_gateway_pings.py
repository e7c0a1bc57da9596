"""Streams whose clients get pings while there is no byte of an answer, read by the vendors' clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.io.http import client_connection
from tests.support.fakes.engine_answers import Script
from tests.support.fakes.gateway_peers import MODEL, FakeEngine, Stack, gateway_before, peers, stack, until_ready
from tests.support.gateway_requests import BODIES, MESSAGES, RESPONSES, claude, finished, gpt
from tests.support.waiting import eventually

SILENCE_S = 0.05
CHAT = BODIES[Endpoint.CHAT] | {"stream": True}
STREAMED = [Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.MESSAGES, Endpoint.RESPONSES]
PINGS = {Endpoint.MESSAGES: b'event: ping\ndata: {"type": "ping"}\n\n'}
COMMENT = b": keep-alive\n\n"
CANCELLED, FAILED, OK, REJECTED = (
    placement_pb2.OUTCOME_CANCELLED,
    placement_pb2.OUTCOME_FAILED,
    placement_pb2.OUTCOME_OK,
    placement_pb2.OUTCOME_REJECTED,
)


@dataclass
class Gated(FakeEngine):
    """Answers nothing before its gate is open; says a prompt is too long in mode `long`, and streams nothing in mode `whole`."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.open += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.open -= 1
        if self.mode == "whole":
            return web.json_response({"choices": [{"index": 0, "text": "no stream"}]})
        if self.mode == "long":
            message = "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens."
            error = {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}
            return web.json_response({"error": error}, status=400)
        return await super().generate(request)


@asynccontextmanager
async def gated(folder: Path, **settings: Any) -> AsyncIterator[tuple[Stack, list[Any]]]:
    async with stack(folder, engine=Gated, **{"silence_s": SILENCE_S} | settings) as up:
        try:
            yield up, up.engines
        finally:
            for engine in up.engines:
                assert isinstance(engine, Gated)
                engine.gate.set()


@asynccontextmanager
async def begun(
    up: Stack, kind: Endpoint = Endpoint.CHAT, body: dict[str, Any] | None = None, **headers: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a streamed request, and wait for the head."""
    sent = (BODIES[kind] if body is None else body) | {"stream": True}
    async with aiohttp.ClientSession() as http, http.post(up.url + kind.value, json=sent, headers=headers) as answer:
        yield answer


def events_of(raw: bytes, ping: bytes = COMMENT) -> list[str]:
    """The events of a stream, after at least one ping."""
    assert raw.count(ping) >= 1
    return raw.replace(ping, b"").decode().split("\n\n")[:-1]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the gateway writes to clients of streams."""
    pieces: list[bytes] = []
    write = client_connection.ResponseWriter.write

    def noting(writer: client_connection.ResponseWriter, piece: bytes) -> None:
        pieces.append(piece)
        write(writer, piece)

    monkeypatch.setattr(client_connection.ResponseWriter, "write", noting)
    return pieces


def counted(gateway: Any) -> dict[str, float]:
    """The numbers of answers to chats, and of those that no route gave, by status."""
    return {
        sample.labels["status"]: sample.value
        for metric in gateway.telemetry.registry.collect()
        for sample in metric.samples
        if sample.name == "pointsman_gateway_requests_total"
        and sample.labels["route"] in (Endpoint.CHAT.value, "other")
    }


async def texts(client: Any, kind: Endpoint) -> AsyncIterator[str]:
    """The pieces of a streamed answer's text, as the vendor's client reads them."""
    body = BODIES[kind]
    match kind:
        case Endpoint.CHAT:
            async for chunk in await client.chat.completions.create(**body, stream=True):
                yield chunk.choices[0].delta.content or ""
        case Endpoint.COMPLETION:
            async for chunk in await client.completions.create(**body, stream=True):
                yield chunk.choices[0].text
        case Endpoint.MESSAGES:
            async for event in await client.messages.create(**body, stream=True):
                yield event.delta.text if event.type == "content_block_delta" else ""
        case _:
            async for event in await client.responses.create(**body, stream=True):
                if event.type == "error":
                    raise openai.APIError(event.message, request=None, body={"code": event.code})  # type: ignore[arg-type]
                yield event.delta if event.type == "response.output_text.delta" else ""


async def first_text(client: Any, kind: Endpoint) -> str:
    return await anext(texts(client, kind))


def client_of(up: Stack, kind: Endpoint) -> Any:
    return claude(up) if kind is Endpoint.MESSAGES else gpt(up)


@pytest.mark.parametrize("kind", STREAMED)
async def test_the_vendors_clients_skip_pings_before_and_between_events(
    tmp_path: Path, written: list[bytes], kind: Endpoint
) -> None:
    ping = PINGS.get(kind, COMMENT)
    async with gated(tmp_path) as (up, engines):
        engines[0].hold = asyncio.Event()

        async def read() -> str:
            async with client_of(up, kind) as client:
                return "".join([text async for text in texts(client, kind)])

        answer = asyncio.create_task(read())
        await eventually(lambda: written.count(ping) >= 3)
        engines[0].gate.set()
        await eventually(lambda: written[-1] == ping and any(piece != ping for piece in written))
        engines[0].hold.set()
        assert await answer == "The points are set."
        assert (await finished(up)).outcome == OK


@pytest.mark.parametrize("kind", STREAMED)
@pytest.mark.parametrize(
    ("mode", "status", "code"), [("400", 400, "BadRequestError"), ("500", 500, "InternalServerError")]
)
async def test_an_engines_error_after_a_ping_is_raised_by_the_vendors_clients(
    tmp_path: Path, written: list[bytes], kind: Endpoint, mode: str, status: int, code: str
) -> None:
    async with gated(tmp_path) as (up, engines):
        for engine in engines:
            engine.mode = mode
        async with begun(up, kind) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert "X-Pointsman-Instance" not in answer.headers
            for engine in engines:
                engine.gate.set()
            (event,) = events_of(await answer.read(), PINGS.get(kind, COMMENT))
        assert "10.0.0.7" not in event
        for engine in engines:
            engine.gate.clear()
        written.clear()
        async with client_of(up, kind) as client:
            described = asyncio.create_task(first_text(client, kind))
            await eventually(lambda: engines[0].open and PINGS.get(kind, COMMENT) in written)
            for engine in engines:
                engine.gate.set()
            with pytest.raises((openai.APIError, anthropic.APIStatusError)) as raised:
                await described
        if kind is Endpoint.MESSAGES:
            error = json.loads(event.removeprefix("event: error\ndata: "))["error"]
            assert error["type"] == {400: "invalid_request_error", 500: "api_error"}[status]
            assert isinstance(raised.value, anthropic.APIStatusError)
            assert raised.value.body == {"type": "error", "error": error}
        else:
            assert code in event


async def test_a_request_that_fails_after_a_ping_is_tried_at_another_instance(tmp_path: Path) -> None:
    async with gated(tmp_path) as (up, engines):
        engines[0].mode = "500"
        async with begun(up) as answer:
            assert await answer.content.readline() == b": keep-alive\n"
            engines[0].gate.set()
            await up.router.until(lambda: len(up.router.places) == 2)
            await eventually(lambda: engines[1].open)
            engines[1].gate.set()
            events = events_of(b": keep-alive\n" + await answer.read())
        assert events[-1] == "data: [DONE]"
        assert "error" not in "".join(events)
        await finished(up, 2)
        assert [finish.outcome for finish in up.router.finished] == [FAILED, OK]
        assert [token.request_id for token in up.router.first_tokens] == [up.router.places[1].request_id]


@pytest.mark.parametrize(
    ("code", "type_", "name", "anthropics"),
    [
        (8, "rate_limit_error", "saturated", "rate_limit_error"),
        (14, "server_error", "no_instance", "overloaded_error"),
        (4, "server_error", "first_token_too_late", "timeout_error"),
    ],
)
async def test_a_router_that_refuses_after_a_ping_is_told_in_each_form(
    tmp_path: Path, code: int, type_: str, name: str, anthropics: str
) -> None:
    bill = tmp_path / "usage.jsonl"
    async with gated(tmp_path, usage_file=bill) as (up, _):
        up.router.placer = lambda _: None
        for count, kind in enumerate(STREAMED, 1):
            async with begun(up, kind) as answer:
                await up.router.until(lambda count=count: len(up.router.places) == count)  # type: ignore[misc]
                request_id = up.router.places[-1].request_id
                await up.router.park(request_id, 60)
                await up.router.refuse(request_id, code, "full", wait_s=3, place=2)
                (event,) = events_of(await answer.read(), PINGS.get(kind, COMMENT))
            data = json.loads(event.partition("data: ")[2])
            match kind:
                case Endpoint.MESSAGES:
                    assert event.startswith("event: error\n")
                    assert data == {"type": "error", "error": {"type": anthropics, "message": "full"}}
                case Endpoint.RESPONSES:
                    assert event.startswith("event: error\n")
                    described = {"code": name, "message": "full", "param": None, "sequence_number": 0}
                    assert data == {"type": "error"} | described
                case _:
                    assert data == {"error": {"message": "full", "type": type_, "param": None, "code": name}}
        await eventually(lambda: len(bill.read_text().splitlines()) == len(STREAMED))
    statuses = {json.loads(line)["status"] for line in bill.read_text().splitlines()}
    assert statuses == {{8: 429, 14: 503, 4: 504}[code]}, "the bill has the status of the error"


async def test_no_placement_in_time_is_told_after_pings(tmp_path: Path) -> None:
    async with gated(tmp_path, placement_timeout_s=4 * SILENCE_S) as (up, _):
        up.router.placer = lambda _: None
        async with begun(up) as answer:
            (event,) = events_of(await answer.read())
        assert json.loads(event[6:])["error"]["code"] == "placement_timeout"


@pytest.mark.parametrize("kind", [Endpoint.CHAT, Endpoint.MESSAGES])
async def test_a_prompt_over_the_context_is_told_after_pings(tmp_path: Path, kind: Endpoint) -> None:
    async with gated(tmp_path) as (up, engines):
        engines[0].mode = "long"
        async with begun(up, kind) as answer:
            engines[0].gate.set()
            (event,) = events_of(await answer.read(), PINGS.get(kind, COMMENT))
        said = "prompt is too long" if kind is Endpoint.MESSAGES else "maximum context length"
        assert said in event
        assert (await finished(up)).outcome == REJECTED
    # The gateway itself counts the tokens of this one in a thread, in which time a ping is due.
    async with stack(tmp_path / "other", silence_s=1e-9) as up:
        body = MESSAGES | {"messages": [{"role": "user", "content": "set the points " * 2_000}]}
        async with begun(up, kind, body) as answer:
            (event,) = events_of(await answer.read(), PINGS.get(kind, COMMENT))
        assert ("prompt is too long" if kind is Endpoint.MESSAGES else "context_length_exceeded") in event
        assert not up.router.places


async def test_an_answer_that_is_no_stream_cannot_follow_pings(tmp_path: Path) -> None:
    async with gated(tmp_path) as (up, engines):
        engines[0].mode = "whole"
        async with begun(up) as answer:
            engines[0].gate.set()
            (event,) = events_of(await answer.read())
        assert json.loads(event[6:])["error"]["code"] == "instance_failed"


async def test_a_fault_of_the_gateway_after_a_ping_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> None:
        raise ZeroDivisionError

    async with gated(tmp_path) as (up, engines):
        async with begun(up) as answer:
            monkeypatch.setattr(RequestContext, "answer_begun", fault)
            engines[0].gate.set()
            (event,) = events_of(await answer.read())
        assert json.loads(event[6:])["error"]["code"] == "internal_error"
        await eventually(lambda: not up.router.reserved, "no reservation is left")


async def test_a_client_that_leaves_after_a_ping_is_cancelled_everywhere(tmp_path: Path) -> None:
    async with gated(tmp_path) as (up, engines):
        async with begun(up):
            await eventually(lambda: engines[0].open)
        assert (await finished(up)).outcome == CANCELLED
        await eventually(lambda: engines[0].aborted)
        up.router.placer = lambda _: None
        async with begun(up):
            await up.router.until(lambda: len(up.router.places) == 2)
            await up.router.park(up.router.places[-1].request_id, 60)
        assert (await finished(up, 2)).outcome == CANCELLED
        await eventually(lambda: counted(up.gateway) == {"499": 2.0})


async def test_a_key_has_its_own_interval_and_gets_its_slot_back(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"red:k1 silence_s={SILENCE_S} in_flight=1\nblue:k2\n")
    async with gated(tmp_path, silence_s=0, api_keys_file=keys) as (up, engines):
        engines[0].mode = "400"
        async with aiohttp.ClientSession() as http:
            without = asyncio.create_task(
                http.post(up.url + Endpoint.CHAT.value, json=CHAT, headers={"Authorization": "Bearer k2"})
            )
            await eventually(lambda: engines[0].open == 1)
            async with begun(up, Authorization="Bearer k1") as answer:
                async with begun(up, Authorization="Bearer k1") as refused:
                    assert refused.status == 429
                engines[0].gate.set()
                assert len(events_of(await answer.read())) == 1
            async with await without as plain:
                assert plain.status == 400
                assert plain.headers["X-Pointsman-Instance"] == "i0"
            async with begun(up, Authorization="Bearer k1") as again:
                assert again.status != 429


async def test_what_is_not_streamed_gets_no_ping(tmp_path: Path) -> None:
    async with gated(tmp_path) as (up, engines), aiohttp.ClientSession() as http:
        engines[0].mode = "400"
        tasks = [
            asyncio.create_task(http.post(up.url + kind.value, json=BODIES[kind]))
            for kind in (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.EMBEDDINGS)
        ]
        await eventually(lambda: engines[0].open == len(tasks))
        async with begun(up):  # which has had a ping, and so would have had the others
            engines[0].gate.set()
        for task in tasks:
            async with await task as answer:
                assert answer.status == 400
    # A ping would be due at once.
    async with stack(tmp_path / "other", silence_s=1e-9) as up, aiohttp.ClientSession() as http:
        headers = {"X-Pointsman-Dry-Run": "1"}
        async with http.post(up.url + Endpoint.CHAT.value, json=CHAT, headers=headers) as explained:
            assert explained.status == 200
            assert "decision" in await explained.json()


async def test_a_drain_that_ends_during_the_silence_is_told(tmp_path: Path) -> None:
    async with peers(tmp_path, 1, engine=Gated) as up, aiohttp.ClientSession() as http:
        async with gateway_before(up, silence_s=SILENCE_S, drain_timeout_s=0) as (gateway, url):
            await until_ready(gateway)
            answer = await http.post(url + Endpoint.CHAT.value, json=CHAT)
        (event,) = events_of(await answer.read())
        assert json.loads(event[6:])["error"]["code"] == "shutting_down"
        assert counted(gateway) == {"503": 1.0}


async def test_a_stored_response_that_is_read_as_a_stream_gets_pings(tmp_path: Path) -> None:
    async with stack(tmp_path, engines=1, silence_s=SILENCE_S) as up:
        async with gpt(up) as client:
            stored = (await client.responses.create(**RESPONSES)).id
        up.engines[0].hold = asyncio.Event()
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{up.url}/v1/responses/{stored}?stream=true") as answer,
        ):
            raw = b""
            while COMMENT not in raw:
                raw += await answer.content.readany()
            up.engines[0].hold.set()
            raw += await answer.read()
        _, words, after = Script(Endpoint.RESPONSES, {"model": MODEL}, up.engines[0].words, 9).events()
        assert len([event for event in events_of(raw) if "output_text.delta" in event]) == len(words)
        assert after
