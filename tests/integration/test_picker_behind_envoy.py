"""A gateway as the endpoint picker of a real Envoy, before scripted engines."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.io.settings import GatewaySettings
from tests.support.certificates import Authority
from tests.support.fakes.gateway_peers import (
    MODEL,
    FakeEngine,
    Stack,
    gateway_before,
    peers,
    refusal,
    serve,
    stack,
    until_ready,
)
from tests.support.fakes.offloading_peers import KvEngine, halves, offloading, reported_steps, slicing
from tests.support.processes.envoy import EnvoySettings, envoy_beside
from tests.support.processes.gateway import gateway_running, logged_url, ready
from tests.support.processes.process import free_port
from tests.support.waiting import eventually

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Set the points. " * 8}]}
SUBSET = "x-only"


@dataclass
class Proxied:
    """A fleet, and the URL of the Envoy before it."""

    stack: Stack
    url: str

    @property
    def endpoints(self) -> list[str]:
        """The engines' endpoints."""
        return [engine.url.removeprefix("http://") for engine in self.stack.engines]


@asynccontextmanager
async def proxied(
    folder: Path, picker: int | None = None, gateway: Any = None, engine: type[FakeEngine] = FakeEngine, **settings: Any
) -> AsyncIterator[Proxied]:
    """Run a fleet behind an Envoy. `picker`: port of the picker, by default the gateway's. `gateway`: its settings."""
    async with stack(folder, ext_proc_listen="127.0.0.1:0", engine=engine, **(gateway or {})) as up:
        endpoints = [engine.url.removeprefix("http://") for engine in up.engines]
        port = up.gateway.ext_proc_port if picker is None else picker
        async with envoy_beside(EnvoySettings(endpoints, [port], **settings), folder) as url:
            yield Proxied(up, url)
            await eventually(lambda: not any(engine.open for engine in up.engines), "nothing is open at the engines")
            await eventually(lambda: not up.router.reserved, "nothing is reserved")
        assert up.gateway.router.open_count == 0


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Proxied]:
    async with proxied(tmp_path) as running:
        yield running


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def body(self) -> Any:
        """The body as JSON."""
        return json.loads(self.text)


async def ask(up: Proxied, path: str, body: Any = None, method: str = "POST", **headers: str) -> Answer:
    """Send a request through Envoy, and wait until the router knows its end."""
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    fields = {"Content-Type": "application/json"} | headers
    async with aiohttp.ClientSession() as http, http.request(method, up.url + path, data=raw, headers=fields) as answer:
        found = Answer(
            answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.text()
        )
    await up.stack.router.until(lambda: not up.stack.router.reserved)
    return found


async def test_a_stream_and_what_each_side_gets_of_the_other(up: Proxied) -> None:
    secrets = {"Authorization": "Bearer sk", "x-api-key": "k", "Cookie": "a=b", "X-Session-ID": "mine",
               "x-gateway-destination-endpoint": "10.0.0.1:1", "X-data-parallel-rank": "3"}  # fmt: skip
    answer = await ask(up, "/v1/chat/completions?x=1", BODY | {"stream": True, "cache_salt": "s"}, **secrets)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "The points are set."
    assert answer.text.endswith("data: [DONE]\n\n")
    assert not any("usage" in event for event in events)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-pointsman-instance"] == "i0"
    assert answer.headers["server"] == "envoy"
    [(path, body, headers)] = up.stack.engines[0].requests
    assert path == "/v1/chat/completions"
    assert body["stream_options"] == {"include_usage": True}
    assert "cache_salt" not in body
    seen = {name.lower(): value for name, value in headers.items()}
    assert not seen.keys() & {"authorization", "x-api-key", "cookie", "x-data-parallel-rank", "content-length"}
    assert seen["x-gateway-destination-endpoint"] == ",".join(up.endpoints)
    assert seen["x-session-id"] == "mine"
    [place], [ended] = up.stack.router.places, up.stack.router.finished
    assert (place.session_id, place.movable) == ("mine", False)
    assert len(place.keys) == place.input_tokens // 16 > 0
    assert (ended.outcome, ended.output_tokens, ended.cached_tokens) == (placement_pb2.OUTCOME_OK, 4, 16)
    assert [first_token.request_id for first_token in up.stack.router.first_tokens] == [place.request_id]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"messages": None, "prompt": "Set the points."}),
        ("/v1/messages", {"max_tokens": 10}),
        ("/v1/responses", {"messages": None, "input": "Set the points."}),
        ("/v1/embeddings", {"messages": None, "input": "Set the points."}),
    ],
)
async def test_an_answer_in_one_piece(up: Proxied, path: str, body: dict[str, Any]) -> None:
    sent = {name: value for name, value in (BODY | body).items() if value is not None}
    answer = await ask(up, path, sent)
    assert answer.status == 200, answer.text
    assert isinstance(answer.body, dict)
    [ended] = up.stack.router.finished
    assert ended.outcome == placement_pb2.OUTCOME_OK
    assert ended.prompt_tokens > 0


@pytest.mark.parametrize("endpoint", ["/v1/messages", "/v1/responses"])
async def test_a_stream_of_another_dialect(up: Proxied, endpoint: str) -> None:
    more = {"max_tokens": 10} if endpoint == "/v1/messages" else {"input": "Set the points."}
    sent = {name: value for name, value in (BODY | more).items() if name != "messages" or endpoint == "/v1/messages"}
    answer = await ask(up, endpoint, sent | {"stream": True})
    assert answer.status == 200
    assert "points " in answer.text
    [ended] = up.stack.router.finished
    assert (ended.outcome, ended.output_tokens) == (placement_pb2.OUTCOME_OK, 4)


async def test_bodies_of_a_megabyte_in_both_directions(up: Proxied) -> None:
    up.stack.engines[0].words = tuple("word " * 2_000 for _ in range(100))
    long = [{"role": "user", "content": "Set. " * 200}]
    answer = await ask(up, "/v1/chat/completions", BODY | {"messages": long, "metadata": {"x": "y" * 1_000_000}})
    assert answer.status == 200, answer.text[:300]
    assert len(answer.text) > 900_000
    [(_, body, _)] = up.stack.engines[0].requests
    assert body["messages"] == long


async def test_what_the_picker_answers_itself(up: Proxied) -> None:
    models = await ask(up, "/v1/models", method="GET")
    assert [model["id"] for model in models.body["data"]][:1] == [MODEL]
    assert (await ask(up, "/v1/sessions/mine", method="DELETE")).status == 204
    assert up.stack.gateway.router.unconfirmed_ends == 1
    tokens = await ask(up, "/tokenize", {"model": MODEL, "prompt": "Set."})
    assert tokens.status in (200, 404)
    assert up.stack.router.places == []


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "code"),
    [
        ("/v1/chat/completions", b"{", {}, 400, "invalid_json"),
        ("/v1/chat/completions", BODY | {"model": "nobody"}, {}, 404, "model_not_found"),
        (
            "/v1/chat/completions",
            BODY | {"messages": [{"role": "user", "content": "x" * 70_000}]},
            {},
            413,
            "body_too_large",
        ),
        ("/v1/chat/completions", BODY, {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("/v1/nothing", BODY, {}, 404, "not_found"),
        ("/v1/chat/completions", BODY, {"X-Pointsman-TTFT-Timeout": "soon"}, 400, "invalid_ttft_timeout"),
    ],
)
async def test_a_bad_request_is_answered_and_reserves_nothing(
    tmp_path: Path, path: str, body: Any, headers: dict[str, str], status: int, code: str
) -> None:
    async with proxied(tmp_path, gateway={"max_body_bytes": 65_536}) as up:
        answer = await ask(up, path, body, **headers)
        assert (answer.status, answer.body["error"]["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/json"
        assert up.stack.router.places == []


async def test_keys_and_their_limits(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("team:sk-1 requests_per_minute=1\n")
    async with proxied(tmp_path, gateway={"api_keys_file": tmp_path / "keys"}) as up:
        assert (await ask(up, "/v1/chat/completions", BODY)).status == 401
        assert (await ask(up, "/v1/chat/completions", BODY, Authorization="Bearer sk-1")).status == 200
        limited = await ask(up, "/v1/chat/completions", BODY, Authorization="Bearer sk-1")
        assert (limited.status, limited.body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(limited.headers["retry-after"]) > 0
        assert [place.tenant for place in up.stack.router.places] == ["team"]


async def test_a_refusal_and_a_pool_without_instances(up: Proxied) -> None:
    up.stack.router.placer = lambda request: refusal(request, 8, "saturated", wait_s=7)
    answer = await ask(up, "/v1/chat/completions", BODY)
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    up.stack.router.placer = up.stack.router.first
    del up.stack.router.pools[0].instances[:]
    await up.stack.router.tell_fleet()
    answer = await ask(up, "/v1/chat/completions", BODY)
    assert (answer.status, answer.body["error"]["code"]) == (503, "no_instance")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("mode", "status"), [("400", 400), ("500", 500), ("503", 503)])
async def test_an_engines_error_is_redacted(up: Proxied, mode: str, status: int, stream: bool) -> None:
    up.stack.engines[0].mode = mode
    answer = await ask(up, "/v1/chat/completions", BODY | {"stream": stream})
    assert answer.status == status
    assert "10.0.0.7" not in answer.text
    assert answer.body["error"]["message"]
    [ended] = up.stack.router.finished
    assert ended.outcome == (placement_pb2.OUTCOME_REJECTED if status == 400 else placement_pb2.OUTCOME_FAILED)


async def test_an_error_in_the_middle_of_a_stream_is_redacted(up: Proxied) -> None:
    up.stack.engines[0].mode = "confess"
    answer = await ask(up, "/v1/chat/completions", BODY | {"stream": True})
    assert '"error"' in answer.text
    assert "10.0.0.7" not in answer.text
    assert [finish.outcome for finish in up.stack.router.finished] == [placement_pb2.OUTCOME_FAILED]


async def test_a_route_that_matches_a_field_stays(tmp_path: Path) -> None:
    """The picker removes the field on its way to the engine."""
    async with proxied(tmp_path, only_with={"x-gateway-model-name": "tiny"}) as up:
        answer = await ask(up, "/v1/chat/completions", BODY, **{"X-Gateway-Model-Name": "tiny"})
        assert answer.status == 200
        [(_, _, headers)] = up.stack.engines[0].requests
        assert "x-gateway-model-name" not in {name.lower() for name in headers}
        assert (await ask(up, "/v1/chat/completions", BODY)).status == 418


async def test_fields_that_begin_like_the_proxys_own_do_not_reach_an_engine(up: Proxied) -> None:
    fields = dict.fromkeys(("hosting", "content-length-x", "x-request-id-2", "x-forwarded-user"), "1")
    assert (await ask(up, "/v1/chat/completions", BODY, **fields)).status == 200
    [(_, _, headers)] = up.stack.engines[0].requests
    assert not {name.lower() for name in headers} & fields.keys()


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ready", "/livez"])
async def test_what_needs_no_key_is_not_for_a_proxys_clients(up: Proxied, path: str) -> None:
    assert (await ask(up, path, method="GET")).status == 404


async def test_an_instance_that_the_proxy_itself_chose_has_the_request(tmp_path: Path) -> None:
    """The picker's endpoint is none of the proxy's."""
    async with proxied(tmp_path, gateway={"ext_proc_fallbacks": 0}) as up:
        up.stack.router.placer = lambda request: serve(request, up.stack.router.pools[0].instances[0])
        with_one = EnvoySettings(up.endpoints[1:], [up.stack.gateway.ext_proc_port])
        async with envoy_beside(with_one, tmp_path) as url:
            answer = await ask(Proxied(up.stack, url), "/v1/chat/completions", BODY)
        assert answer.status == 200
        await up.stack.router.until(lambda: len(up.stack.router.finished) == 2)
        left, ended = up.stack.router.finished
        assert (left.outcome, ended.outcome) == (placement_pb2.OUTCOME_FAILED, placement_pb2.OUTCOME_OK)
        assert [stream.instance_id for stream in up.stack.router.open_streams] == ["i1"]


async def test_a_proxy_without_room_blames_nobody(tmp_path: Path) -> None:
    async with proxied(tmp_path, most_requests=1) as up:
        up.stack.engines[0].hold = asyncio.Event()
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{up.url}/v1/chat/completions", json=BODY | {"stream": True}) as first,
            http.post(f"{up.url}/v1/chat/completions", json=BODY | {"stream": True}) as second,
        ):
            assert (first.status, second.status) == (200, 502)
            up.stack.engines[0].hold.set()
            await first.read()
        await up.stack.router.until(lambda: len(up.stack.router.finished) == 2)
        outcomes = {finish.outcome for finish in up.stack.router.finished}
        assert outcomes == {placement_pb2.OUTCOME_OK, placement_pb2.OUTCOME_CANCELLED}


async def test_an_engine_that_refuses_connections_is_at_fault(up: Proxied) -> None:
    await up.stack.engines[0]._site.stop()
    answer = await ask(up, "/v1/chat/completions", BODY)
    assert answer.status == 502
    [failed] = up.stack.router.finished
    assert (failed.outcome, failed.refused) == (placement_pb2.OUTCOME_FAILED, False)


async def test_a_stored_response_is_read_in_one_piece(up: Proxied) -> None:
    sent = {"model": MODEL, "input": "Set the points.", "store": True}
    stored = (await ask(up, "/v1/responses", sent)).body["id"]
    for query in ("", "?stream=true"):
        answer = await ask(up, f"/v1/responses/{stored}{query}", method="GET")
        assert (answer.status, answer.body["id"]) == (200, stored)


async def test_a_response_is_stored_where_its_id_says(up: Proxied) -> None:
    """So a proxy gets no other endpoint for it."""
    assert (await ask(up, "/v1/responses", {"model": MODEL, "input": "Set the points."})).status == 200
    [(_, _, headers)] = up.stack.engines[0].requests
    assert headers["x-gateway-destination-endpoint"] == up.endpoints[0]


async def test_an_engine_that_breaks_off_breaks_the_stream(up: Proxied) -> None:
    """The proxy tells no picker why a stream has ended: it counts as one whose client has left."""
    engine = up.stack.engines[0]
    engine.mode, engine.hold = "cut", asyncio.Event()
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{up.url}/v1/chat/completions", json=BODY | {"stream": True}) as answer,
    ):
        assert b"The " in await answer.content.readany()
        engine.hold.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    await up.stack.router.until(lambda: not up.stack.router.reserved)
    assert [finish.outcome for finish in up.stack.router.finished] == [placement_pb2.OUTCOME_CANCELLED]


@pytest.mark.parametrize("failure", ["refuses", "503"])
async def test_envoy_goes_down_the_list_and_the_router_learns_who_answered(tmp_path: Path, failure: str) -> None:
    async with proxied(tmp_path, retries=2) as up:
        dead, alive = up.stack.engines
        if failure == "refuses":
            await dead._site.stop()
        else:
            dead.mode = "503"
        answer = await ask(up, "/v1/chat/completions", BODY | {"stream": True})
        assert answer.status == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        assert len(alive.requests) == 1
        await up.stack.router.until(lambda: len(up.stack.router.finished) == 2)
        failed, ended = up.stack.router.finished
        [place] = up.stack.router.places
        assert (failed.request_id, failed.outcome) == (place.request_id, placement_pb2.OUTCOME_FAILED)
        assert (ended.request_id, ended.outcome) == (f"{place.request_id}.1", placement_pb2.OUTCOME_OK)
        [alone] = up.stack.router.open_streams
        assert (alone.request.request_id, alone.instance_id) == (ended.request_id, "i1")


async def test_nobody_on_the_list_answers(tmp_path: Path) -> None:
    async with proxied(tmp_path, retries=1) as up:
        for engine in up.stack.engines:
            await engine._site.stop()
        answer = await ask(up, "/v1/chat/completions", BODY | {"stream": True})
        assert answer.status in (502, 503)
        assert answer.body["error"]["code"]
        assert {finish.outcome for finish in up.stack.router.finished} == {placement_pb2.OUTCOME_FAILED}


async def test_the_runner_up_is_the_first_on_the_list_after_the_chosen(tmp_path: Path) -> None:
    async with proxied(tmp_path) as up:

        def placed(request: placement_pb2.PlacementRequest) -> placement_pb2.Placement:
            found = serve(request, up.stack.router.pools[0].instances[1])
            found.runner_up = "i0"
            return found

        up.stack.router.placer = placed
        assert (await ask(up, "/v1/chat/completions", BODY)).status == 200
        [(_, _, headers)] = up.stack.engines[1].requests
        assert headers["x-gateway-destination-endpoint"] == ",".join(reversed(up.endpoints))


async def test_an_envoy_that_takes_one_endpoint_and_no_list(tmp_path: Path) -> None:
    async with proxied(tmp_path, gateway={"ext_proc_fallbacks": 0}, original_dst=True) as up:
        answer = await ask(up, "/v1/chat/completions", BODY | {"stream": True})
        assert (answer.status, answer.headers["x-pointsman-instance"]) == (200, "i0")
        [(_, _, headers)] = up.stack.engines[0].requests
        assert headers["x-gateway-destination-endpoint"] == up.endpoints[0]


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_elsewhere_is_done_before_the_proxy_is_answered(
    tmp_path: Path, stream: bool, layerwise: bool
) -> None:
    """The picker makes P compute and D pull, and the proxy sends D a request like any other."""
    async with proxied(tmp_path, engine=KvEngine) as up:
        offloading(up.stack, layerwise=(layerwise, layerwise))
        answer = await ask(up, "/v1/chat/completions", BODY | {"stream": stream})
        assert (answer.status, answer.headers["x-pointsman-instance"]) == (200, "i1")
        assert (halves(up.stack, 0), halves(up.stack, 1)) == (["send"], ["fetch"])
        assert reported_steps(up.stack) == [(0, "")]
        assert not up.stack.engines[0].requests
        [(_, body, headers)] = up.stack.engines[1].requests
        assert "kv_transfer_params" not in body
        assert headers["x-gateway-destination-endpoint"].startswith(up.endpoints[1])
        assert [finish.outcome for finish in up.stack.router.finished] == [placement_pb2.OUTCOME_OK]


@pytest.mark.parametrize("failing", ["sends", "fetches"])
async def test_after_a_failed_transfer_the_instance_computes_the_prompt(tmp_path: Path, failing: str) -> None:
    async with proxied(tmp_path, engine=KvEngine) as up:
        offloading(up.stack)
        setattr(up.stack.engines[failing == "fetches"], failing, "500")
        answer = await ask(up, "/v1/chat/completions", BODY | {"stream": True})
        assert (answer.status, answer.headers["x-pointsman-instance"]) == (200, "i1")
        assert reported_steps(up.stack)[-1][1]
        assert [finish.outcome for finish in up.stack.router.finished] == [placement_pb2.OUTCOME_OK]


async def test_slices_are_computed_before_the_proxy_is_answered(tmp_path: Path) -> None:
    async with proxied(tmp_path) as up:
        slicing(up.stack, 16, 48)
        answer = await ask(up, "/v1/chat/completions", BODY)
        assert answer.status == 200
        paths = [path for path, _, _ in up.stack.engines[0].requests]
        assert paths[-1] == "/v1/chat/completions"
        assert len(paths) == 3
        assert reported_steps(up.stack) == [(0, ""), (1, "")]


@pytest.mark.parametrize("when", ["before the answer", "in the stream"])
async def test_a_client_that_leaves(up: Proxied, when: str) -> None:
    engine = up.stack.engines[0]
    if when == "in the stream":
        engine.hold = asyncio.Event()
    else:
        engine.mode = "hang"
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(f"{up.url}/v1/chat/completions", json=BODY | {"stream": True}))
        await eventually(lambda: engine.open == 1, "the engine has the request")
        if when == "in the stream":
            answer = await asking
            await up.stack.router.until(lambda: bool(up.stack.router.first_tokens))
            answer.close()
        else:
            asking.cancel()
    await up.stack.router.until(lambda: not up.stack.router.reserved)
    assert [finish.outcome for finish in up.stack.router.finished] == [placement_pb2.OUTCOME_CANCELLED]
    await eventually(lambda: engine.aborted == 1, "the engine is told")


async def test_a_subset_is_respected(tmp_path: Path) -> None:
    async with proxied(tmp_path, subset=SUBSET) as up:
        for at in (1, 0):
            answer = await ask(up, "/v1/chat/completions", BODY, **{SUBSET: up.endpoints[at]})
            assert answer.headers["x-pointsman-instance"] == f"i{at}"
            _, _, headers = up.stack.engines[at].requests[-1]
            assert headers["x-gateway-destination-endpoint"] == up.endpoints[at]
        placed = len(up.stack.router.places)
        answer = await ask(up, "/v1/chat/completions", BODY, **{SUBSET: "10.9.9.9:80"})
        assert answer.status == 503
        assert len(up.stack.router.places) == placed


@pytest.mark.parametrize("modes", [("BUFFERED", "STREAMED"), ("FULL_DUPLEX_STREAMED", "NONE")])
async def test_another_mode_is_refused_with_its_reason(tmp_path: Path, modes: tuple[str, str]) -> None:
    async with proxied(tmp_path, body_modes=modes) as up:
        answer = await ask(up, "/v1/chat/completions", BODY)
        assert (answer.status, answer.body["error"]["code"]) == (500, "wrong_processing_mode")
        assert up.stack.router.places == []


@pytest.mark.parametrize("fail_open", [False, True])
async def test_a_picker_that_is_gone(tmp_path: Path, fail_open: bool) -> None:
    async with proxied(tmp_path, picker=1, pickers_up=False, fail_open=fail_open) as up:
        answer = await ask(up, "/v1/chat/completions", BODY)
        assert answer.status == (200 if fail_open else 500)
        assert sum(len(engine.requests) for engine in up.stack.engines) == fail_open


async def test_a_picker_with_a_certificate(tmp_path: Path) -> None:
    """A proxy dials it by TLS. With an authority for proxies, one without a certificate is no proxy."""
    signed = Authority(tmp_path / "authority").sign("picker")
    files = {"ext_proc_cert": signed.cert, "ext_proc_key": signed.key}
    async with proxied(tmp_path, gateway=files, tls=True) as up:
        assert (await ask(up, "/v1/chat/completions", BODY)).status == 200
    strict = files | {"ext_proc_client_ca": tmp_path / "authority" / "ca.pem"}
    (tmp_path / "strict").mkdir()
    async with proxied(tmp_path / "strict", gateway=strict, tls=True, pickers_up=False) as up:
        assert (await ask(up, "/v1/chat/completions", BODY)).status == 500
        assert up.stack.router.places == []


@pytest.mark.parametrize("given", [{"ext_proc_cert": "a"}, {"ext_proc_key": "a"}, {"ext_proc_client_ca": "a"}])
def test_a_certificate_needs_its_key(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="belong together"):
        GatewaySettings(**given)


async def test_several_processes_of_a_gateway_are_one_picker(tmp_path: Path) -> None:
    port = free_port()
    async with peers(tmp_path, 2) as up:
        settings = {
            "LISTEN": f"127.0.0.1:{free_port()}",
            "EXT_PROC_LISTEN": f"127.0.0.1:{port}",
            "ROUTERS": up.router.address,
            "PROCESSES": "2",
        }
        async with gateway_running(settings) as (_, log):
            await ready(await logged_url(log))
            await eventually(
                lambda: sum(b"gateway serves proxies" in line for line in log) == 2, "both processes serve"
            )
            endpoints = [engine.url.removeprefix("http://") for engine in up.engines]
            async with (
                envoy_beside(EnvoySettings(endpoints, [port]), tmp_path) as url,
                aiohttp.ClientSession() as http,
                http.post(f"{url}/v1/chat/completions", json=BODY) as answer,
            ):
                assert answer.status == 200, await answer.text()


async def test_an_address_in_use_is_reported(tmp_path: Path) -> None:
    async with peers(tmp_path, 1) as up:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            at = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(OSError, match="another process listens there"):
                async with gateway_before(up, ext_proc_listen=at):
                    pass


async def test_a_gateway_that_stops_ends_its_streams_with_an_error(tmp_path: Path) -> None:
    async with peers(tmp_path, 2) as up, AsyncExitStack() as running:
        up.engines[0].hold = asyncio.Event()
        gateway, _ = await running.enter_async_context(gateway_before(up, ext_proc_listen="127.0.0.1:0"))
        await until_ready(gateway)
        endpoints = [engine.url.removeprefix("http://") for engine in up.engines]
        async with (
            envoy_beside(EnvoySettings(endpoints, [gateway.ext_proc_port]), tmp_path) as url,
            aiohttp.ClientSession() as http,
            http.post(f"{url}/v1/chat/completions", json=BODY | {"stream": True}) as answer,
        ):
            await up.router.until(lambda: bool(up.router.first_tokens))
            await running.aclose()
            text = await answer.text()
    assert '"error"' in text
    assert [finish.outcome for finish in up.router.finished] == [placement_pb2.OUTCOME_CANCELLED]
