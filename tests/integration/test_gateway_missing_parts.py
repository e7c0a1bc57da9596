"""The gateway when something is missing: the router, the tokenizer, the instances, a client's key."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.pool_state import TokenizerStatus
from pointsman_gateway.io import routes
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.routing import model_pools
from pointsman_gateway.io.settings import GatewaySettings
from tests.support.fakes.gateway_peers import MODEL, fake_router, stack
from tests.support.gateway_requests import CHAT, post
from tests.support.processes.gateway import gateway_process, gateway_running, logged_url, ready
from tests.support.processes.process import free_port
from tests.support.tiny_tokenizer import make_tokenizer
from tests.support.waiting import eventually


async def test_without_its_router_it_places_by_itself_and_tells_the_router_that_returns(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        port = int(up.router.address.rpartition(":")[2])
        for engine in up.engines:
            engine.hold = asyncio.Event()
        async with aiohttp.ClientSession() as http:
            open_before = await http.post(f"{up.url}/v1/chat/completions", json=CHAT | {"stream": True})
            await open_before.content.readline()
            await up.router.stop()
            # Least in flight: i0 is busy, so the next one goes to i1.
            await eventually(lambda: not up.gateway.router.connected)
            degraded = await http.post(f"{up.url}/v1/chat/completions", json=CHAT | {"stream": True})
            assert degraded.headers["X-Pointsman-Degraded"] == "1"
            assert degraded.headers["X-Pointsman-Instance"] == "i1"
            await degraded.content.readline()
            back = fake_router(up.router.pools)
            await back.start(port)
            try:
                await back.until(lambda: len(back.hellos) == 1)
                streams = {stream.instance_id: stream for stream in back.hellos[0].open_streams}
                assert set(streams) == {"i0", "i1"}
                assert streams["i0"].phase == placement_pb2.PHASE_DECODE
                assert streams["i0"].generated_tokens == 1
                assert streams["i0"].request.input_tokens > 0
                assert list(streams["i0"].request.keys) == []
                for engine in up.engines:
                    assert engine.hold is not None
                    engine.hold.set()
                for answer in (open_before, degraded):
                    assert (await answer.read()).endswith(b"[DONE]\n\n")
                await back.until(lambda: len(back.finished) == 2)
                assert {finish.request_id for finish in back.finished} == {
                    stream.request.request_id for stream in streams.values()
                }
                await eventually(lambda: up.gateway.router.connected)
                status, _, headers = await post(up, "/v1/chat/completions", json=CHAT)
                assert status == 200
                assert "X-Pointsman-Degraded" not in headers
            finally:
                await back.stop()


async def test_without_its_router_an_adapter_is_asked_for_only_where_it_is_loaded(tmp_path: Path) -> None:
    async with stack(tmp_path, engines=3) as up:
        up.router.pools[0].instances[2].lora_names.append("tiny-lora")
        await up.router.tell_fleet()
        await eventually(lambda: up.gateway.pools.states()[0].pool.instances[2].lora_names)
        adapter = CHAT | {"model": "tiny-lora"}
        status, _, _ = await post(up, "/detokenize", json={"model": "tiny-lora", "tokens": [1]})
        assert (status, len(up.engines[2].requests)) == (200, 1)
        await up.router.stop()
        await eventually(lambda: not up.gateway.router.connected)
        for _ in range(4):
            status, _, headers = await post(up, "/v1/chat/completions", json=adapter)
            assert (status, headers["X-Pointsman-Instance"]) == (200, "i2")
        asked = {(await post(up, "/v1/chat/completions", json=CHAT))[2]["X-Pointsman-Instance"] for _ in range(3)}
        assert asked == {"i0", "i1", "i2"}


async def test_without_its_router_each_sequence_of_a_request_counts(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        for engine in up.engines:
            engine.hold = asyncio.Event()
        await up.router.stop()
        await eventually(lambda: not up.gateway.router.connected)
        async with aiohttp.ClientSession() as http:
            several = await http.post(f"{up.url}/v1/chat/completions", json=CHAT | {"stream": True, "n": 4})
            await several.content.readline()
            answers, elsewhere = [several], "i1" if several.headers["X-Pointsman-Instance"] == "i0" else "i0"
            for _ in range(3):
                one = await http.post(f"{up.url}/v1/chat/completions", json=CHAT | {"stream": True})
                await one.content.readline()
                assert one.headers["X-Pointsman-Instance"] == elsewhere
                answers.append(one)
            assert up.gateway.router.open_count == 4
            assert sorted(up.gateway.router.inflight().values()) == [3, 4]
            for engine in up.engines:
                assert engine.hold is not None
                engine.hold.set()
            for answer in answers:
                assert (await answer.read()).endswith(b"[DONE]\n\n")
        await eventually(lambda: up.gateway.router.inflight() == {})


async def test_a_request_that_waits_for_its_step_is_asked_again_of_the_router_that_returns(tmp_path: Path) -> None:
    async with stack(tmp_path, router_grace_s=20.0) as up:
        up.router.placer = lambda request: None
        asked = asyncio.create_task(post(up, "/v1/chat/completions", json=CHAT))
        await up.router.until(lambda: len(up.router.places) == 1)
        port = int(up.router.address.rpartition(":")[2])
        await up.router.stop()
        back = fake_router(up.router.pools)
        await back.start(port)
        try:
            status, _, headers = await asked
            assert status == 200
            assert "X-Pointsman-Degraded" not in headers
            assert back.places[0].request_id == up.router.places[0].request_id
            assert list(back.hellos[0].open_streams) == []
        finally:
            await back.stop()


async def test_the_next_router_is_tried_when_the_first_is_away(tmp_path: Path) -> None:
    router = fake_router([])
    await router.start()
    try:
        settings = GatewaySettings(listen="127.0.0.1:0", routers=["127.0.0.1:1", router.address])
        async with serving(settings):
            await router.until(lambda: len(router.hellos) == 1)
    finally:
        await router.stop()


async def test_with_nothing_there_it_says_so(tmp_path: Path) -> None:
    settings = GatewaySettings(listen="127.0.0.1:0", routers=["127.0.0.1:1"])
    async with serving(settings) as (_, url), aiohttp.ClientSession() as http:
        async with http.get(f"{url}/health") as answer:
            assert answer.status == 503
            assert "no session with a router" in (await answer.json())["missing"]
        async with http.post(f"{url}/v1/chat/completions", json=CHAT) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


async def test_a_model_that_has_left_a_short_time_ago_may_be_asked_for_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last engine restarts. The models of other engines stay."""
    async with stack(tmp_path) as up:
        [tiny] = up.router.pools
        other = placement_pb2.Pool(model="other", served_names=["other"])

        async def has(*pools: placement_pb2.Pool) -> None:
            up.router.pools = [*pools]
            await up.router.tell_fleet()
            await eventually(lambda: len(up.gateway.pools.states()) == len(pools), "the gateway knows")

        async def asked(model: str) -> tuple[int, str | None]:
            body = CHAT | {"model": model}
            async with aiohttp.ClientSession() as http, http.post(f"{up.url}/v1/chat/completions", json=body) as answer:
                return answer.status, answer.headers.get("Retry-After")

        await has(tiny, other)
        await has(other)
        assert [await asked(name) for name in (MODEL, "tiny-alias", "nobody")] == [(503, "1"), (503, "1"), (404, None)]
        await has(tiny, other)
        assert await asked(MODEL) == (200, None)
        monkeypatch.setattr(model_pools, "EXPECTED_S", 0.0)
        await has(other)
        assert await asked(MODEL) == (404, None)
    async with stack(tmp_path, tokenizers=[f"configured={tmp_path / 'nowhere'}"]) as up:
        status, answer, _ = await post(up, Endpoint.CHAT.value, json=CHAT | {"model": "configured"})
        assert (status, answer["error"]["code"]) == (503, "no_instance")


async def test_a_gateway_that_has_just_started_lets_requests_wait_for_its_fleet(tmp_path: Path) -> None:
    async with stack(tmp_path, ready=False) as up:
        assert not up.gateway.pools.states()
        status, answer, _ = await post(up, Endpoint.CHAT.value, json=CHAT)
        assert status == 200, answer


async def test_a_router_that_starts_has_not_described_its_fleet_yet(tmp_path: Path) -> None:
    async with stack(tmp_path, ready=False) as up:
        described, up.router.pools, up.router.starting = up.router.pools, [], True
        await eventually(lambda: up.gateway.router.connected, "a session")
        asked = asyncio.create_task(post(up, Endpoint.CHAT.value, json=CHAT))
        await asyncio.sleep(0.2)
        assert not asked.done()
        up.router.pools, up.router.starting = described, False
        await up.router.tell_fleet()
        status, answer, _ = await asked
        assert status == 200, answer


async def test_a_gateway_without_a_router_refuses_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "FIRST_FLEET_S", 0.1)
    async with stack(tmp_path, ready=False, routers=[f"127.0.0.1:{free_port()}"]) as up:
        for _ in range(2):
            status, answer, _ = await post(up, Endpoint.CHAT.value, json=CHAT)
            assert (status, answer["error"]["code"]) == (503, "no_instance")


async def test_other_tokens_than_the_engines_are_not_used(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        for engine in up.engines:
            engine.token_shift = 1
        pool = up.router.pools[0]
        for ref in pool.instances:
            ref.incarnation = "2"
        up.gateway.pools.update([pool])
        (state,) = up.gateway.pools.states()
        await eventually(lambda: state.tokenizer_status is TokenizerStatus.INEXACT)
        assert (state.tokenizer_status, state.reason) == (
            TokenizerStatus.INEXACT,
            "text probe 0 (add_special_tokens=true) differs",
        )
        status, _, _ = await post(up, "/v1/chat/completions", json=CHAT)
        assert status == 200
        place = up.router.places[0]
        assert list(place.keys) == []
        assert place.input_tokens == pytest.approx(len(CHAT["messages"][0]["content"]) / 4, abs=1)
        async with aiohttp.ClientSession() as http, http.get(f"{up.url}/health") as answer:
            body = await answer.json()
            assert (answer.status, body["status"], body["models"][MODEL]["tokenizer"]) == (200, "degraded", "inexact")


async def test_without_a_tokenizer_it_places_without_keys(tmp_path: Path) -> None:
    async with stack(tmp_path, tokenizers=[f"{MODEL}={tmp_path / 'nowhere'}"]) as up:
        (state,) = up.gateway.pools.states()
        assert state.tokenizer_status is TokenizerStatus.INEXACT
        assert (await post(up, "/v1/chat/completions", json=CHAT))[0] == 200
        assert list(up.router.places[0].keys) == []


async def test_a_fault_in_a_check_or_a_session_does_not_stop_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("pointsman_gateway.io.routing.model_pools.first_difference", broken)
    async with stack(tmp_path) as up:
        (state,) = up.gateway.pools.states()
        assert (state.tokenizer_status, state.reason) == (
            TokenizerStatus.INEXACT,
            "the check failed: ZeroDivisionError",
        )
        update, calls = up.gateway.router._on_pools, []

        def once(pools: Sequence[placement_pb2.Pool]) -> None:
            calls.append(pools)
            if len(calls) == 1:
                raise ZeroDivisionError
            update(pools)

        monkeypatch.setattr(up.gateway.router, "_on_pools", once)
        port = int(up.router.address.rpartition(":")[2])
        await up.router.stop()
        await up.router.start(port)
        await eventually(lambda: len(calls) == 2)
        assert (await post(up, "/v1/chat/completions", json=CHAT))[0] == 200


async def test_counts_that_disagree_three_times_in_a_row_lead_to_another_check(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        (state,) = up.gateway.pools.states()
        pools = up.gateway.pools
        for ours, theirs in ((5, 5), (5, 6), (5, 6), (5, 5), (5, 6), (5, 6)):
            pools.check_token_count(state, Endpoint.CHAT, ours, theirs)
        assert state.verified
        make_tokenizer(tmp_path / "model", "{{ messages[0].content }}")
        pools.check_token_count(state, Endpoint.CHAT, 5, 6)
        assert not state.verified
        await eventually(lambda: state.verified and state.tokenizer_status is TokenizerStatus.EXACT)


async def test_an_api_whose_counts_disagree_is_placed_without_keys(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        (state,) = up.gateway.pools.states()
        for theirs in (5, 6, 6, 5, 6, 6):
            up.gateway.pools.check_token_count(state, Endpoint.MESSAGES, 5, theirs)
        assert state.tokenizer_for(Endpoint.MESSAGES) is not None
        up.gateway.pools.check_token_count(state, Endpoint.MESSAGES, 5, 6)
        assert state.tokenizer_for(Endpoint.MESSAGES) is None
        assert state.tokenizer_for(Endpoint.CHAT) is state.tokenizer is not None
        state.pool.instances[0].incarnation = "2"
        up.gateway.pools.update([state.pool])
        assert state.tokenizer_for(Endpoint.MESSAGES) is not None


async def test_only_known_keys_may_call_and_name_the_tenant(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# who may\nred:secret-1\nblue:secret-2\n")
    async with stack(tmp_path, api_keys_file=keys) as up:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret-1"}):
            status, answer, _ = await post(up, "/v1/chat/completions", json=CHAT, headers=header)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for key in ("secret-1", "secret-2"):
            header = {"Authorization": f"Bearer {key}", "X-Session-ID": "same"}
            assert (await post(up, "/v1/chat/completions", json=CHAT, headers=header))[0] == 200
        assert [(place.tenant, place.session_id) for place in up.router.places] == [("red", "same"), ("blue", "same")]
        sent = [headers for _, _, headers in up.engines[0].requests]
        assert [headers["X-Session-ID"] for headers in sent] == ["red/same", "blue/same"]
        assert all("Authorization" not in headers for headers in sent)


async def test_the_routers_token_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_GATEWAY_TOKEN", "s3cret")
    async with stack(tmp_path) as up:
        assert up.router.metadata["authorization"] == "Bearer s3cret"


async def test_sigterm_lets_an_open_stream_end(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        up.engines[0].hold = asyncio.Event()
        environment = {"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address, "DRAIN_TIMEOUT_S": "20"}
        async with gateway_running(environment) as (process, log), aiohttp.ClientSession() as http:
            url = await logged_url(log)
            await ready(url)
            stream = await http.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": True})
            await stream.content.readline()
            process.send_signal(signal.SIGTERM)
            await eventually(lambda: any(b"drains" in line for line in log))
            up.engines[0].hold.set()
            assert (await stream.read()).endswith(b"[DONE]\n\n")
            assert await process.wait() == 0
            await up.router.until(lambda: len(up.router.finished) == 1)
            assert up.router.finished[0].outcome == placement_pb2.OUTCOME_OK


async def test_a_second_sigterm_ends_the_drain(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        up.engines[0].hold = asyncio.Event()
        environment = {"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address}
        async with gateway_running(environment) as (process, log), aiohttp.ClientSession() as http:
            url = await logged_url(log)
            await ready(url)
            stream = await http.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": True})
            await stream.content.readline()
            process.send_signal(signal.SIGTERM)
            await eventually(lambda: any(b"drains" in line for line in log))
            await asyncio.sleep(1.1)  # sooner, it would count as the same signal, which a parent may also forward
            process.send_signal(signal.SIGTERM)
            assert b'"code":502' in await stream.read()
            assert await process.wait() == 0


async def test_a_stream_that_outlives_the_drain_is_cancelled_and_reported(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as http:
        async with stack(tmp_path, drain_timeout_s=0.2) as up:
            up.engines[0].hold = asyncio.Event()
            stream = await http.post(f"{up.url}/v1/chat/completions", json=CHAT | {"stream": True})
            await stream.content.readline()
            waiting = asyncio.create_task(http.post(f"{up.url}/v1/chat/completions", json=CHAT))
            up.engines[0].mode = "hang"
            await eventually(lambda: up.engines[0].open == 2)
            router = up.router
            engine = up.engines[0]
        assert [finish.outcome for finish in router.finished] == [placement_pb2.OUTCOME_CANCELLED] * 2
        assert engine.open == 0
        # Complete for HTTP, with an error event at its end: a stream that only breaks off looks like the end of some answers.
        error = json.loads((await stream.read()).split(b"data: ")[-1])
        assert error["error"]["code"] == 502
        refused = await waiting
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert (await refused.json())["error"]["code"] == "shutting_down"


async def test_what_hinders_the_start_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for setting, value, said in (
            ("LISTEN", f"127.0.0.1:{taken.getsockname()[1]}", b"another process listens there"),
            ("API_KEYS_FILE", str(tmp_path / "keys"), b"No such file"),
        ):
            process = await gateway_process({"LISTEN": "127.0.0.1:0", setting: value})
            _, text = await process.communicate()
            assert process.returncode == 1
            assert text.startswith(b"pointsman gateway: ")
            assert said in text
            assert len(text.splitlines()) == 1
