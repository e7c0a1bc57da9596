"""Prefill on one instance, answer from another, over real sockets: what each engine is sent, and what happens when one fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import generate_latest

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import Endpoint, parse
from pointsman_gateway.core.pool_state import TokenizerStatus
from pointsman_gateway.io import tokenizer_files
from tests.support.fakes.gateway_peers import MODEL, Stack, stack
from tests.support.fakes.offloading_peers import (
    CHAT,
    STREAM,
    KvEngine,
    answered,
    breaks_both,
    halves,
    offload_stack,
    offloading,
    p_and_d,
    reported_steps,
)
from tests.support.gateway_requests import BODIES
from tests.support.tiny_tokenizer import CHATML
from tests.support.waiting import eventually


@pytest.fixture
async def up(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """A gateway in which the timeouts that a test's parameter names are short."""
    async with offload_stack(tmp_path, getattr(request, "param", ())) as running:
        yield running


async def test_a_stream_brings_the_kv_along(up: Stack) -> None:
    p, d = p_and_d(up)
    assert await answered(up, STREAM) == ("i1", "The points are set.")
    ((_, sent, params),), ((_, served, fetched),) = p.halves, d.halves
    # P's request has the prompt, and no field that could end or shape its one token.
    assert {name: sent.pop(name) for name in ("model", "messages", "tools", "temperature")} == {
        name: CHAT[name] for name in ("model", "messages", "tools", "temperature")
    }
    assert sent == {
        "stream": False,
        "max_completion_tokens": 1,
        "n": 1,
        "ignore_eos": True,
        "kv_transfer_params": params,
    }
    assert (params["do_remote_decode"], len(params["transfer_id"])) == (True, 32)
    assert served == STREAM | {"kv_transfer_params": fetched}
    assert fetched == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": params["transfer_id"],
        "remote_engine_id": "e1",
        "remote_bootstrap_addr": p.url,
    }
    assert reported_steps(up) == [(0, "")]


async def test_every_transfer_has_an_id_of_its_own_and_the_bootstrap_server_is_asked_once(up: Stack) -> None:
    p, _ = p_and_d(up)
    for _ in range(3):
        await answered(up, STREAM)
    assert len({params["transfer_id"] for _, _, params in p.halves}) == 3
    assert p.queries == 1


@pytest.mark.parametrize(
    "body",
    [CHAT, STREAM | {"n": 2}, STREAM | {"response_format": {"type": "json_object"}}],
    ids=["whole", "several", "formatted"],
)
async def test_what_cannot_bring_the_kv_along_finds_it_in_the_cache(up: Stack, body: dict[str, Any]) -> None:
    p, d = p_and_d(up)
    assert (await answered(up, body))[0] == "i1"
    ((_, sent, _),), ((half, pulled, fetched),) = p.halves, d.halves
    assert (half, fetched["do_remote_prefill"]) == ("fetch", True)
    assert pulled == sent | {"kv_transfer_params": fetched}
    ((_, served, _),) = d.requests
    assert served == body


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Endpoint.MESSAGES, {"thinking": {"type": "disabled"}, "tools": []}),
        (Endpoint.RESPONSES, {"tools": [{"type": "web_search"}]}),
    ],
)
async def test_the_prompt_of_another_api_is_sent_as_its_tokens(up: Stack, kind: Endpoint, more: dict[str, Any]) -> None:
    p, d = p_and_d(up)
    body = BODIES[kind] | more
    async with aiohttp.ClientSession() as http, http.post(up.url + kind.value, json=body) as answer:
        assert (answer.status, answer.headers["X-Pointsman-Instance"]) == (200, "i1")
        await answer.read()
    await eventually(lambda: not up.router.reserved)
    ((_, sent, _),), ((_, pulled, fetched),) = p.halves, d.halves
    assert sent["prompt"] == p.tokenizer.prompt(parse(kind, json.dumps(body).encode())).ids.tolist()
    assert pulled == sent | {"kv_transfer_params": fetched}
    ((path, _, _),) = d.requests
    assert path == kind.value


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize(
    ("clock", "form", "parted"),
    [("12:00", "%d %b", True), ("23:55", "%d %b", False), ("12:00", "%H:%M", False)],
    ids=["noon", "midnight", "minutes"],
)
async def test_a_prompt_that_may_change_on_its_way_is_computed_where_it_is_answered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: str,
    form: str,
    parted: bool,
    layerwise: bool,
    body: dict[str, Any],
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Clock:
            return cls.fromisoformat(f"2026-03-04T{clock}:30")

    monkeypatch.setattr(tokenizer_files, "datetime", Clock)
    async with stack(tmp_path, engine=KvEngine, template=f"{{{{ strftime_now('{form}') }}}}{CHATML}") as up:
        offloading(up, layerwise=(layerwise, layerwise))
        assert (await answered(up, body))[0] == "i1"
        assert [len(place.keys) > 0 for place in up.router.places] == [True]
        assert [place.single_instance for place in up.router.places] == [not parted]
        # If the router ignores single_instance, the gateway refuses the step.
        step, error = reported_steps(up)[0]
        assert (step, error.endswith("another instance may see other tokens"), error == "") == (0, not parted, parted)
        assert (halves(up, 0), halves(up, 1)) == ((["send"], ["fetch"]) if parted else ([], []))


@pytest.mark.parametrize("why", ["differs", "checking", "its own template"])
async def test_a_prompt_whose_tokens_are_not_known_is_computed_where_it_is_answered(up: Stack, why: str) -> None:
    body = STREAM
    if why == "its own template":
        body = STREAM | {"chat_template": "x"}
    else:
        status = TokenizerStatus.INEXACT if why == "differs" else TokenizerStatus.CHECKING
        up.gateway.pools.states()[0].tokenizer_status = status
    assert (await answered(up, body))[0] == "i1"
    assert [place.single_instance for place in up.router.places] == [True]
    assert (halves(up, 0), halves(up, 1)) == ([], [])


async def test_nixl_forwards_what_p_says(up: Stack) -> None:
    offloading(up, agent_pb2.KV_PROTOCOL_NIXL)
    p, d = p_and_d(up)
    p.answers = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[1, 2]], "remote_port": 1}
    assert await answered(up, STREAM) == ("i1", "The points are set.")
    assert p.queries == 0
    assert [params for _, _, params in d.halves] == [p.answers]


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("up", "fault", "error"),
    [
        ((), {"sends": "500"}, "status 500"),
        (("prefill_timeout_s",), {"sends": "hang"}, "deadline"),
        ((), {"sends": "early"}, "the prefill stopped early"),
        ((), {"engine_id": ""}, "the bootstrap server: status 503"),
    ],
    ids=["refuses", "slow", "early", "bootstrap"],
    indirect=["up"],
)
async def test_when_p_fails_d_answers_alone(up: Stack, body: dict[str, Any], fault: dict[str, str], error: str) -> None:
    p, d = p_and_d(up)
    for name, value in fault.items():
        setattr(p, name, value)
    assert await answered(up, body) == ("i1", "The points are set.")
    assert reported_steps(up) == [(0, error)]
    assert [done.instance_failed for done in up.router.step_dones] == [error == "deadline"]
    # D answered the request, so P's refusal was not the request's fault.
    refused_by = [name for first_token in up.router.first_tokens for name in first_token.refused_by]
    assert refused_by == (["i0"] if error == "status 500" else [])
    assert (d.halves, len(d.requests)) == ([], 1)
    assert len(up.router.finished) == 1
    await eventually(lambda: p.open == 0)


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("up", "does", "error"),
    [((), "500", "status 500"), (("transfer_timeout_s",), "hang", "deadline")],
    ids=["refuses", "slow"],
    indirect=["up"],
)
async def test_when_the_kv_does_not_come_d_answers_alone(
    up: Stack, body: dict[str, Any], does: str, error: str
) -> None:
    _, d = p_and_d(up)
    d.fetches = does
    assert await answered(up, body) == ("i1", "The points are set.")
    assert reported_steps(up) == [(0, ""), (1, error)]
    assert not any(done.instance_failed for done in up.router.step_dones)
    assert (halves(up, 0), halves(up, 1), len(d.requests)) == (["send"], ["fetch"], 1)
    await eventually(lambda: d.open == 0)


async def test_a_stream_that_begins_with_an_error_is_not_the_answer(up: Stack) -> None:
    _, d = p_and_d(up)
    d.fetches = "error"
    assert await answered(up, STREAM) == ("i1", "The points are set.")
    assert reported_steps(up) == [(0, ""), (1, "the answer began with an error")]


async def test_after_a_failed_transfer_the_bootstrap_server_is_asked_again(up: Stack) -> None:
    p, d = p_and_d(up)
    await answered(up, STREAM)
    p.engine_id = d.engine_id = "e2"  # it restarted, and nobody has noticed yet
    up.router.step_dones.clear()
    d.fetches = "500"
    await answered(up, STREAM)
    assert reported_steps(up)[-1] == (1, "status 500")
    assert p.queries == 1
    await answered(up, STREAM)
    assert p.queries == 2
    assert d.halves[-1][2]["remote_engine_id"] == "e2"


async def test_when_d_is_gone_another_answers(up: Stack) -> None:
    d = up.router.pools[0].instances[1]
    d.url = "http://127.0.0.1:1"
    offloading(up)
    assert await answered(up, STREAM) == ("i0", "The points are set.")
    assert [list(place.exclude) for place in up.router.places] == [[], ["i1"]]
    assert len(up.router.finished) == 2


async def test_a_request_that_breaks_p_and_then_d_is_sent_to_no_other(up: Stack) -> None:
    await breaks_both(up, STREAM)


def released(up: Stack) -> list[list[str]]:
    """The transfers that each engine was asked to release."""
    return [[params["transfer_id"] for params in engine.released] for engine in p_and_d(up)]


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
@pytest.mark.parametrize("fault", ["refuses", "gone", "nobody"])
async def test_kv_that_certainly_nobody_fetches_is_let_go(up: Stack, body: dict[str, Any], fault: str) -> None:
    p, d = p_and_d(up)
    if fault == "refuses":
        d.fetches = "500"
    elif fault == "gone":
        up.router.pools[0].instances[1].url = "http://127.0.0.1:1"
        offloading(up)
    else:
        # The router now places the SERVE step on the instance that prefilled.
        plan = up.router.placer

        def then_there(
            request: placement_pb2.PlacementRequest,
        ) -> placement_pb2.Placement | placement_pb2.Refusal | None:
            answer = plan(request)
            [following] = up.router.next_steps
            assert isinstance(following, placement_pb2.Placement)
            following.step.ClearField("kv_source")
            return answer

        up.router.placer = then_there
    await answered(up, body)
    await eventually(lambda: released(up) == [[p.halves[0][2]["transfer_id"]], []])
    counted = 'pointsman_gateway_kv_releases_total{outcome="released"} 1.0'
    await eventually(lambda: counted in generate_latest(up.gateway.telemetry.registry).decode())


async def test_what_d_may_have_fetched_is_left_to_d_and_p(up: Stack) -> None:
    """A D that refuses a request notifies P itself; a D that closed the connection may have fetched the KV."""
    p, d = p_and_d(up)
    for d.fetches in ("ok", "400", "reset"):
        for body in (STREAM, CHAT):
            async with aiohttp.ClientSession() as http, http.post(f"{up.url}/v1/chat/completions", json=body) as answer:
                await answer.read()
            await up.router.until(lambda: not up.router.reserved)
    # Releases are sent in order: earlier ones would have arrived by now.
    d.fetches = "500"
    await answered(up, STREAM)
    await eventually(lambda: released(up)[0] != [])
    assert released(up) == [[p.halves[-1][2]["transfer_id"]], []]


async def test_nixls_kv_is_let_go_by_another_than_p(up: Stack) -> None:
    offloading(up, agent_pb2.KV_PROTOCOL_NIXL)
    p, d = p_and_d(up)
    p.answers = {"do_remote_prefill": True, "remote_engine_id": "p", "transfer_id": "named by P"}
    d.fetches = "500"
    await answered(up, STREAM)
    await eventually(lambda: released(up) == [[], ["named by P"]])


@pytest.mark.parametrize("stuck", ["sends", "fetches"])
@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["stream", "whole"])
async def test_a_client_that_leaves_ends_what_is_open(up: Stack, stuck: str, body: dict[str, Any]) -> None:
    engine = p_and_d(up)[stuck == "fetches"]
    setattr(engine, stuck, "hang")
    async with aiohttp.ClientSession() as http:
        asking = asyncio.ensure_future(http.post(f"{up.url}/v1/chat/completions", json=body))
        await eventually(lambda: engine.open == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert up.router.finished[0].outcome == placement_pb2.OUTCOME_CANCELLED
    await eventually(lambda: engine.open == 0)


async def test_a_client_cannot_steer_a_transfer(up: Stack) -> None:
    p, d = p_and_d(up)
    evil = {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "http://evil"}
    await answered(up, STREAM | {"kv_transfer_params": evil, "vllm_xargs": {"kv_transfer_params": evil, "a": 1}})
    for _, body, params in (*p.halves, *d.halves):
        assert params["transfer_id"] != "x"
        assert "evil" not in json.dumps(body)


TIMES = ("t_recv", "t_placed", "t_prefill_sent", "t_prefill_done", "t_sent", "t_first_token", "t_done")


async def breakdown(file: Path, count: int) -> list[dict[str, Any]]:
    def lines() -> list[str]:
        return file.read_text().splitlines()

    await eventually(lambda: len(lines()) == count)
    return [json.loads(line) for line in lines()]


async def test_each_attempt_leaves_a_breakdown_of_its_time(up: Stack, tmp_path: Path) -> None:
    p, _ = p_and_d(up)
    await answered(up, STREAM)
    p.sends = "500"
    await answered(up, CHAT)
    offloaded, alone = await breakdown(tmp_path / "breakdown.jsonl", 2)
    for line in (offloaded, alone):
        moments = [line[name] for name in TIMES]
        assert moments == sorted(moments)
        assert (line["outcome"], line["status"], line["instances"]) == ("OK", 200, ["i0", "i1"])
        assert (line["cached_tokens"], line["output_tokens"], line["model"]) == (16, 4, MODEL)
        assert "points" not in json.dumps(line)
    assert [line.get("fallback", "") for line in (offloaded, alone)] == ["", "status 500"]


async def test_a_breakdown_tells_of_failed_attempts_what_they_came_to(up: Stack, tmp_path: Path) -> None:
    p, d = p_and_d(up)
    p.sends = d.mode = "500"
    p.mode = "400"
    async with aiohttp.ClientSession() as http, http.post(f"{up.url}/v1/chat/completions", json=STREAM) as answer:
        assert answer.status == 400
    await up.router.until(lambda: len(up.router.finished) == 2)
    first, second = await breakdown(tmp_path / "breakdown.jsonl", 2)
    assert [line["outcome"] for line in (first, second)] == ["FAILED", "REJECTED"]
    assert "t_prefill_sent" in first
    assert "t_prefill_sent" not in second
    assert "t_first_token" not in first
    assert second["instances"] == ["i0"]
