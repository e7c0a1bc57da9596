"""A gateway in front of two engines with KV transfer, and a router that plans PREFILL on one and SERVE on the other, or lets one
fetch what the other has cached."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.request.transfer_params import RELEASE_MODEL
from tests.support.fakes.gateway_peers import MODEL, FakeEngine, Stack, stack

TOOLS = [{"type": "function", "function": {"name": "set_points", "parameters": {"type": "object"}}}]
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "set the points so that each train takes the right track"}],
    "tools": TOOLS,
    "temperature": 0,
    "stop": ["."],
    "stop_token_ids": [3],
    "min_tokens": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "max_completion_tokens": 40,
}
STREAM = CHAT | {"stream": True, "stream_options": {"include_usage": True}}


@dataclass
class KvEngine(FakeEngine):
    """An engine with a KV connector.

    `sends` and `fetches` set its behaviour in the two halves of a transfer: ok, 400, 500, hang, early (the answer ends by a stop
    token), error (a stream that begins with an error; told error, error kept alive: after a comment), reset, wait (until `go`
    is set, then ok).
    """

    sends: str = "ok"
    fetches: str = "ok"
    answers: dict[str, Any] | None = None  # P's answer about its KV (NIXL)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    released: list[dict[str, Any]] = field(default_factory=list)
    halves: list[tuple[str, dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        params = body.get("kv_transfer_params")
        if params is None:
            return await super().generate(request)
        if body["model"] == RELEASE_MODEL:
            self.released.append(params)
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        half = "send" if params.get("do_remote_decode") else "fetch"
        does = self.sends if half == "send" else self.fetches
        self.halves.append((half, body, params))
        if half == "fetch" and params.get("remote_engine_id", "") not in ("e1", "p"):
            does = "500"
        if does == "hang":
            self.open += 1
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.aborted += 1
                raise
            finally:
                self.open -= 1
        if does == "wait":
            await self.go.wait()
        if does == "500":
            return web.Response(status=500, text="boom at 10.0.0.7")
        if does == "400":
            return web.json_response({"error": {"message": "no", "type": "BadRequestError", "code": 400}}, status=400)
        if does == "reset":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if does in ("error", "told error", "error kept alive"):
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            if does == "told error":  # As an engine with the connector package writes it.
                await answer.write(b":\n\n")
            if does == "error kept alive":
                await answer.write(b": keep-alive\n\n")
            await answer.write(b'data: {"error": {"message": "KV load failed"}}\n\ndata: [DONE]\n\n')
            return answer
        if body.get("stream"):
            return await super().generate(request)
        reason = "stop" if does == "early" else "length"
        usage = {"prompt_tokens_details": {"cached_tokens": self.cached(body)}}
        choices = [{"finish_reason": reason}]
        return web.json_response({"choices": choices, "usage": usage, "kv_transfer_params": self.answers})


@asynccontextmanager
async def offload_stack(tmp_path: Path, short: Sequence[str] = (), **more: Any) -> AsyncIterator[Stack]:
    """Run a gateway and a router that offloads. Timeouts are 60 s, or 0.3 s for the settings in `short`. `more`: as stack()."""
    limits: dict[str, Any] = {"transfer_timeout_s": 60.0, "prefill_timeout_s": 60.0} | dict.fromkeys(short, 0.3)
    limits["breakdown_file"] = tmp_path / "breakdown.jsonl"
    async with stack(tmp_path, engine=KvEngine, **limits, **more) as running:
        offloading(running)
        yield running
        assert [engine.open for engine in running.engines] == [0, 0]
        assert running.router.reserved == set()


def offloading(
    up: Stack,
    protocol: agent_pb2.KvProtocol.ValueType = agent_pb2.KV_PROTOCOL_MOONCAKE,
    layerwise: tuple[bool, bool] = (False, False),
) -> None:
    """Make the router plan PREFILL on i0 and SERVE on i1; after a failure, SERVE on i1 without KV."""
    p, d = transferring(up, protocol, layerwise)
    normal = up.router.placer

    def offload(request: placement_pb2.PlacementRequest) -> placement_pb2.Placement | placement_pb2.Refusal | None:
        if request.exclude:
            return normal(request)
        first = placement_pb2.Step(
            kind=placement_pb2.STEP_KIND_PREFILL, instance=p, prefix_tokens=request.input_tokens, kv_target=d
        )
        second = placement_pb2.Step(index=1, kind=placement_pb2.STEP_KIND_SERVE, instance=d, kv_source=p)
        up.router.next_steps = [placement_pb2.Placement(decision_id="d", step=second, last=True)]
        return placement_pb2.Placement(request_id=request.request_id, decision_id="d", step=first)

    def failed(done: placement_pb2.StepDone) -> placement_pb2.Placement:
        step = placement_pb2.Step(index=done.step_index + 1, kind=placement_pb2.STEP_KIND_SERVE, instance=d)
        return placement_pb2.Placement(decision_id="d", step=step, last=True)

    up.router.placer, up.router.after_failure = offload, failed


def transferring(
    up: Stack,
    protocol: agent_pb2.KvProtocol.ValueType = agent_pb2.KV_PROTOCOL_MOONCAKE,
    layerwise: tuple[bool, bool] = (False, False),
) -> tuple[placement_pb2.InstanceRef, placement_pb2.InstanceRef]:
    """Announce that i0 and i1 transfer KV; return them."""
    p, d = up.router.pools[0].instances
    p.kv_transfer.layerwise, d.kv_transfer.layerwise = layerwise
    for ref, engine in zip((p, d), up.engines, strict=True):
        ref.kv_transfer.protocol = protocol
        ref.kv_transfer.bootstrap_url = engine.url
    return p, d


async def answered(up: Stack, body: dict[str, Any]) -> tuple[str, str]:
    """Send a chat; return the instance that answered, and the text. Waits until the router has received the request's end."""
    async with aiohttp.ClientSession() as http, http.post(f"{up.url}/v1/chat/completions", json=body) as answer:
        raw = await answer.text()
        assert answer.status == 200, raw
        assert "kv_transfer_params" not in raw
    if body.get("stream"):
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["delta"]["content"] for event in events if event["choices"])
        assert raw.rstrip().endswith("data: [DONE]")
    else:
        text = json.loads(raw)["choices"][0]["message"]["content"]
    await up.router.until(lambda: not up.router.reserved)
    return answer.headers["X-Pointsman-Instance"], text


async def breaks_both(up: Stack, body: dict[str, Any]) -> None:
    """Ask for an answer of which P and then D break, and check that no other gets it, and who the router is told broke."""
    p, d = p_and_d(up)
    p.sends, d.mode = "reset", "cut"
    async with aiohttp.ClientSession() as http, http.post(f"{up.url}/v1/chat/completions", json=body) as answer:
        assert b"error" in await answer.read()
    await up.router.until(lambda: len(up.router.finished) == 1)
    (ended,) = up.router.finished
    assert (ended.outcome, ended.broke, list(ended.alike)) == (placement_pb2.OUTCOME_REJECTED, True, ["i0"])


def halves(up: Stack, engine: int) -> list[str]:
    server = up.engines[engine]
    assert isinstance(server, KvEngine)
    return [half for half, _, _ in server.halves]


def reported_steps(up: Stack) -> list[tuple[int, str]]:
    return [(done.step_index, done.error) for done in up.router.step_dones]


def fetches_by_outcome(up: Stack) -> dict[str, int]:
    """How many fetches the gateway has counted, by outcome, without those that did not happen."""
    found = up.gateway.telemetry.kv_fetches.collect()[0].samples
    return {
        sample.labels["outcome"]: int(sample.value)
        for sample in found
        if sample.name.endswith("_total") and sample.value
    }


def p_and_d(up: Stack) -> tuple[KvEngine, KvEngine]:
    p, d = up.engines
    assert isinstance(p, KvEngine)
    assert isinstance(d, KvEngine)
    return p, d


def slicing(up: Stack, *prefixes: int, at: int = 0, fetches: int = 0) -> None:
    """Make the router plan a PREFILL on an instance for each of `prefixes` (tokens), then SERVE there. The first `fetches`
    prefixes are fetched from the other instance."""
    instance, other = up.router.pools[0].instances[at], up.router.pools[0].instances[1 - at]

    def step(index: int, tokens: int = 0) -> placement_pb2.Placement:
        kind = placement_pb2.STEP_KIND_PREFILL if tokens else placement_pb2.STEP_KIND_SERVE
        source = other if tokens and index < fetches else None
        given = placement_pb2.Step(index=index, kind=kind, instance=instance, prefix_tokens=tokens, kv_source=source)
        return placement_pb2.Placement(decision_id="d", step=given, last=not tokens)

    def first(request: placement_pb2.PlacementRequest) -> placement_pb2.Placement:
        given, *plan = [*(step(index, tokens) for index, tokens in enumerate(prefixes)), step(len(prefixes))]
        given.request_id = request.request_id
        up.router.plans[request.request_id] = [*plan]
        return given

    up.router.placer = first
    # After a failure this router sends another PREFILL, which the gateway must not carry out.
    up.router.after_failure = lambda done: step(done.step_index + 1, 1_024)
