"""The emulated engine over its sockets: what clients, agents and gateways rely on."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import decode_batch
from pointsman_common.core.block_keys import prompt_keys
from pointsman_common.core.key_report_types import Tier
from pointsman_lab.emulator.emulated_engine import EmulatedEngine, EmulateSettings, start
from pointsman_lab.emulator.http_routes import EngineApp
from pointsman_lab.emulator.scripted_answers import Piece
from pointsman_lab.workload.tokenizer import ChatTokenizer, words_of

MODEL = "pointsman-emulated"
TOKENIZER = ChatTokenizer()
Starter = Callable[..., Awaitable[EmulatedEngine]]


@pytest.fixture
async def emulate() -> AsyncIterator[Starter]:
    running: list[EmulatedEngine] = []

    async def begin(**settings: Any) -> EmulatedEngine:
        engine = await start(EmulateSettings(**({"port": 0, "speedup": 20.0} | settings)))
        running.append(engine)
        return engine

    yield begin
    for engine in running:
        await engine.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with http.post(url, json=body) as response:
        return response.status, await response.json()


async def stream(http: aiohttp.ClientSession, url: str, body: Any) -> list[Any]:
    chunks: list[Any] = []
    async with http.post(url, json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                chunks.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return chunks


async def settled(condition: Callable[[], bool]) -> None:
    """Wait for `condition`; the test's own timeout ends one that never comes."""
    while not condition():  # noqa: ASYNC110 (the model is plain state, it has nothing to await)
        await asyncio.sleep(0.005)


async def test_streamed_and_whole_answers_agree_and_count_the_same(
    emulate: Starter, http: aiohttp.ClientSession
) -> None:
    engine, other = await emulate(), await emulate(block_size=32, hash_seed=5, max_num_batched_tokens=16)
    prompt = words_of("p", 100, TOKENIZER.words)
    url = "/v1/chat/completions"
    status, whole = await post(http, engine.url + url, chat(prompt, max_tokens=20, ignore_eos=True))
    assert status == 200
    text = whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["kv_transfer_params"] is None
    assert whole["usage"]["completion_tokens"] == 20
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    # An answer's text encodes to the answer's tokens, so that the next turn shares them.
    assert len(TOKENIZER.encode(text)) == 20
    for again in (engine, other):
        body = chat(
            prompt, max_completion_tokens=20, ignore_eos=True, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last, done = await stream(http, again.url + url, body)
        assert done == "[DONE]"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert last["choices"] == []
        # The first engine has the full blocks cached that end before the last token; the other one computes the whole prompt.
        cached = (whole["usage"]["prompt_tokens"] - 1) // 16 * 16 if again is engine else 0
        assert last["usage"] == whole["usage"] | {"prompt_tokens_details": {"cached_tokens": cached}}
    without = await stream(http, engine.url + url, chat(prompt, max_tokens=2, stream=True))
    assert all("usage" not in chunk for chunk in without[:-1])


async def test_the_openai_client_is_served(emulate: Starter) -> None:
    engine = await emulate()
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        first = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "which train is next?"}], max_tokens=500
        )
        assert first.choices[0].finish_reason == "stop"
        assert first.choices[0].message.content
        second = await client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "user", "content": "which train is next?"},
                {"role": "assistant", "content": first.choices[0].message.content},
                {"role": "user", "content": "and then?"},
            ],
            max_tokens=4,
        )
        assert first.usage
        assert second.usage
        assert second.usage.prompt_tokens_details
        # The answer's blocks are cached too, and the next turn's prompt hits them.
        total = first.usage.prompt_tokens + first.usage.completion_tokens - 1
        assert second.usage.prompt_tokens_details.cached_tokens == total // 16 * 16
        text = await client.completions.create(
            model=MODEL, prompt=" the signal", max_tokens=3, extra_body={"ignore_eos": True}
        )
        ids = TOKENIZER.encode(" the signal")
        same = await client.completions.create(model=MODEL, prompt=ids, max_tokens=3, extra_body={"ignore_eos": True})
        assert text.choices[0].text == same.choices[0].text


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", b"{", 400, None),
        ("/v1/chat/completions", b"[]", 400, None),
        ("/v1/chat/completions", chat("x") | {"model": "other"}, 404, "model"),
        ("/v1/chat/completions", {"model": MODEL, "messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"content": "x"}]}, 400, "messages"),
        ("/v1/chat/completions", chat("x", max_tokens=0), 400, "max_tokens"),
        ("/v1/chat/completions", chat("x", max_tokens=-1), 400, "max_tokens"),
        ("/v1/chat/completions", chat("x", max_tokens=65), 400, "max_tokens"),
        ("/v1/chat/completions", chat("x " * 100), 400, "input_tokens"),
        ("/v1/chat/completions", chat("x", n=2), 400, "n"),
        ("/v1/completions", {"model": MODEL, "prompt": [999_999]}, 400, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": [5, -1]}, 400, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"model": MODEL}, 400, "prompt"),
        ("/tokenize", {"model": "other", "prompt": "x"}, 404, "model"),
    ],
)
async def test_bad_input_is_answered_as_vllm_does(
    emulate: Starter, http: aiohttp.ClientSession, path: str, body: Any, status: int, param: str | None
) -> None:
    engine = await emulate(max_model_len=64)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(engine.url + path, data=raw) as response:
        answer = (await response.json())["error"]
        assert response.status == answer["code"] == status
        assert answer["param"] == param
        assert answer["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert not engine.model.has_work


async def test_paths_of_stored_responses_are_vllms(emulate: Starter, http: aiohttp.ClientSession) -> None:
    engine = await emulate()
    for method, path, status in (("GET", "resp_x", 404), ("POST", "resp_x/cancel", 404), ("POST", "compact", 405)):
        async with http.request(method, f"{engine.url}/v1/responses/{path}", json={}) as answer:
            assert answer.status == status, path
            assert status == 405 or (await answer.json())["error"]["param"] == "response_id"


async def test_tokenize_agrees_with_what_is_counted(emulate: Starter, http: aiohttp.ClientSession) -> None:
    engine = await emulate()
    body = chat("héllo 世界 🚂\n\n\tdef f(x): return x  # 12345 <|im_end|>")
    _, tokens = await post(http, f"{engine.url}/tokenize", body)
    _, answer = await post(http, f"{engine.url}/v1/chat/completions", body | {"max_tokens": 1})
    assert tokens["count"] == len(tokens["tokens"]) == answer["usage"]["prompt_tokens"]
    assert tokens["max_model_len"] == 131_072
    text = "héllo 世界 🚂\n\n\tdef"
    _, plain = await post(http, f"{engine.url}/tokenize", {"prompt": text})
    assert await post(http, f"{engine.url}/detokenize", {"tokens": plain["tokens"]}) == (200, {"prompt": text})


async def test_render_answers_the_tokens_that_are_then_computed(emulate: Starter, http: aiohttp.ClientSession) -> None:
    engine = await emulate()
    body = chat("a question of several words") | {"max_tokens": 1}
    status, rendered = await post(http, f"{engine.url}/v1/chat/completions/render", body)
    _, tokens = await post(http, f"{engine.url}/tokenize", body)
    assert (status, rendered["token_ids"], rendered["features"]) == (200, tokens["tokens"], None)
    text = {"model": body["model"], "prompt": "a text"}
    _, [completion] = await post(http, f"{engine.url}/v1/completions/render", text)
    _, plain = await post(http, f"{engine.url}/tokenize", text)
    assert completion["token_ids"] == plain["tokens"]
    assert not engine.model.has_work
    assert (await post(http, f"{engine.url}/v1/chat/completions/render", body | {"model": "other"}))[0] == 404


async def test_metrics_have_vllms_names_and_labels(emulate: Starter, http: aiohttp.ClientSession) -> None:
    engine = await emulate(kv_blocks=10_000)
    for _ in range(2):
        await post(http, f"{engine.url}/v1/chat/completions", chat("a b c d " * 20, max_tokens=3, ignore_eos=True))
    async with http.get(f"{engine.url}/metrics") as response:
        assert response.content_type == "text/plain"
        lines = (await response.text()).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = f'engine="0",model_name="{MODEL}"'
    assert float(values[f"vllm:num_requests_running{{{label}}}"]) == 0
    assert float(values[f"vllm:num_requests_waiting{{{label}}}"]) == 0
    assert float(values[f"vllm:kv_cache_usage_perc{{{label}}}"]) == 0
    assert float(values[f"vllm:generation_tokens_total{{{label}}}"]) == 6
    queries, hits = (float(values[f"vllm:prefix_cache_{name}_total{{{label}}}"]) for name in ("queries", "hits"))
    assert 0 < hits < queries
    assert float(values[f'vllm:prompt_tokens_by_source_total{{{label},source="local_cache_hit"}}']) == hits
    assert float(values[f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{MODEL}"}}']) == 2
    assert float(values[f"vllm:time_to_first_token_seconds_count{{{label}}}"]) == 2
    assert float(values[f"vllm:inter_token_latency_seconds_count{{{label}}}"]) == 4
    info = next(line for line in values if line.startswith("vllm:cache_config_info"))
    for part in ('block_size="16"', 'engine="0"', 'num_gpu_blocks="10001"', 'kv_cache_size_tokens="160016"'):
        assert part in info
    assert float(values["process_start_time_seconds"]) > 1e9


async def replay(endpoint: str, first: int) -> list[tuple[int, Any]]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[tuple[int, Any]] = []
        while True:
            empty, topic, seq, payload = await dealer.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if seq == b"\xff" * 8:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)))


async def test_kv_events_and_their_replay(emulate: Starter, http: aiohttp.ClientSession) -> None:
    engine = await emulate()
    async with http.get(f"{engine.url}/kv_event_sources") as response:
        source = (await response.json())["0"]
    assert source["enable_kv_cache_events"] is True
    assert source["topic"] == ""
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as live:
        live.setsockopt(zmq.LINGER, 0)
        live.subscribe(b"")
        live.connect(source["endpoint"])
        ids = TOKENIZER.encode(words_of("k", 40, TOKENIZER.words))
        body = {"prompt": ids, "max_tokens": 30, "ignore_eos": True, "cache_salt": "salt", "session_id": "s1"}
        _, answer = await post(http, f"{engine.url}/v1/completions", body)
        batches = await replay(source["replay_endpoint"], 0)
        # PUB drops messages sent before the subscription, so send requests until one arrives.
        received = asyncio.ensure_future(live.recv_multipart())
        number = 0
        while not received.done():
            number += 1
            await post(http, f"{engine.url}/v1/completions", {"prompt": [number % 200] * 20, "max_tokens": 1})
        topic, seq, payload = received.result()
    assert topic == b""
    assert dict(await replay(source["replay_endpoint"], 0))[int.from_bytes(seq, "big")] == msgspec.msgpack.decode(
        payload
    )
    assert [seq for seq, _ in batches] == list(range(len(batches)))
    assert all(batch[2] == 0 for _, batch in batches)
    events = [event for _, batch in batches for event in batch[1]]
    assert {event["type"] for event in events} == {"BlockStored"}
    tokens = [*ids, *TOKENIZER.encode(answer["choices"][0]["text"])]
    assert [token for event in events for token in event["token_ids"]] == tokens[: 69 // 16 * 16]
    hashes = [value for event in events for value in event["block_hashes"]]
    assert [event["parent_block_hash"] for event in events] == [None, *hashes[1:3]]
    assert events[0]["extra_keys"] == [["salt"], None]
    assert {(event["medium"], event["block_size"], event["group_idx"], event["session_id"]) for event in events} == {
        ("GPU", 16, 0, "s1")
    }
    assert [seq for seq, _ in await replay(source["replay_endpoint"], 2)][:1] == [2]


async def test_eviction_and_reset_are_published(emulate: Starter, http: aiohttp.ClientSession) -> None:
    engine = await emulate(kv_blocks=8, max_model_len=128)
    for token in (300, 400, 500):
        await post(http, f"{engine.url}/v1/completions", {"prompt": [token] * 64, "max_tokens": 1})
    async with http.post(f"{engine.url}/reset_prefix_cache") as response:
        assert response.status == 200
    await post(http, f"{engine.url}/v1/completions", {"prompt": [600] * 64, "max_tokens": 1})
    events = [event for _, batch in await replay(engine.replay_endpoint, 0) for event in batch[1]]
    known: set[int] = set()
    for event in events:
        if event["type"] == "BlockStored":
            known.update(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            known.difference_update(event["block_hashes"])
        else:
            known.clear()
    assert {event["type"] for event in events} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert known == set(engine.model.cache.cached_hashes())
    assert len(known) == 4


async def test_blocks_in_host_memory_are_published_as_vllm_publishes_them(
    emulate: Starter, http: aiohttp.ClientSession
) -> None:
    engine = await emulate(kv_blocks=64, max_model_len=1_000, host_tier=2)
    prompts = [[token] * 600 for token in (300, 400, 500)]
    cached = []
    for prompt in (*prompts, prompts[0]):
        _, answer = await post(http, f"{engine.url}/v1/completions", {"prompt": prompt, "max_tokens": 1})
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    # Two prompts of 37 full blocks do not fit into the engine's own cache, so the first one comes from host memory.
    assert cached == [0, 0, 0, 592]
    assert engine.model.counters.external_prefix_cache_hits == 592
    # An idle engine notices the end of its transfers, too.
    offloading = engine.model.offloading
    assert offloading is not None
    await settled(lambda: not offloading.in_transfer)
    blocks = CachedBlocks(MODEL, capacity_blocks=64)
    for _, batch in await replay(engine.replay_endpoint, 0):
        blocks.apply(decode_batch(msgspec.msgpack.encode(batch)).events)
        blocks.check()
    assert (blocks.counts.orphans, blocks.counts.malformed, blocks.counts.unknown_removed) == (0, 0, 0)
    assert blocks.keys(Tier.HOST) == {key for prompt in prompts for key in prompt_keys(prompt, MODEL)}
    assert blocks.keys(Tier.DEVICE) >= set(prompt_keys(prompts[0], MODEL))
    assert (await post(http, f"{engine.url}/sleep", {}))[0] == 200
    assert offloading.host.hashes() == []


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_frees_the_engine(
    emulate: Starter, http: aiohttp.ClientSession, streamed: bool
) -> None:
    engine = await emulate(speedup=1.0)
    body = chat("x", max_tokens=50_000, ignore_eos=True, stream=streamed)
    asking = asyncio.create_task(stream(http, f"{engine.url}/v1/chat/completions", body))
    await settled(lambda: engine.model.num_running == 1)
    asking.cancel()
    await settled(lambda: not engine.model.has_work)
    assert engine.model.kv_usage == 0


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_client_that_leaves_as_a_token_comes_is_nothing_to_log(
    emulate: Starter,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    after: int,
) -> None:
    """The connection closes after a token is generated and before it is written, too early for the handler to be cancelled."""
    answer = EngineApp._stream

    async def leave(app: EngineApp, request: web.Request, *rest: Any) -> web.StreamResponse:
        read, left = app._pieces, iter(range(after, -1, -1))

        def pieces(*rest: Any) -> list[Piece]:
            if next(left, 0) == 0 and request.transport is not None:
                request.transport.abort()
            return read(*rest)

        with monkeypatch.context() as patch:
            patch.setattr(app, "_pieces", pieces)
            return await answer(app, request, *rest)

    monkeypatch.setattr(EngineApp, "_stream", leave)
    engine = await emulate()
    # On a busy machine one chunk of an answer has many tokens.
    body = chat("x", max_tokens=5_000, ignore_eos=True, stream=True)
    with pytest.raises(aiohttp.ClientError):
        await stream(http, f"{engine.url}/v1/chat/completions", body)
    await settled(lambda: not engine.model.has_work)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_prefill_on_one_instance_and_decode_on_another(emulate: Starter, http: aiohttp.ClientSession) -> None:
    first, second = await emulate(), await emulate()
    prompt = words_of("pd", 200, TOKENIZER.words)
    async with http.get(f"{first.url}/query") as response:
        engine_id = (await response.json())["0"]["engine_id"]
    remote = {
        "do_remote_prefill": True,
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": first.url,
        "transfer_id": "t1",
    }
    body = chat(prompt, max_tokens=5, ignore_eos=True)
    url = "/v1/chat/completions"
    # The decode request is sent first, and waits.
    decoding = asyncio.create_task(post(http, second.url + url, body | {"kv_transfer_params": remote}))
    await asyncio.sleep(0)
    given = {"do_remote_decode": True, "transfer_id": "t1"}
    status, prefilled = await post(http, first.url + url, body | {"max_tokens": 1, "kv_transfer_params": given})
    assert (status, prefilled["kv_transfer_params"]) == (200, None)
    status, answer = await decoding
    length = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == length
    assert second.model.counters.external_kv_transfer == length
    assert second.model.counters.local_compute == 0
    alone = await post(http, first.url + url, body)
    assert alone[1]["choices"][0]["message"] == answer["choices"][0]["message"]
    wrong = body | {"kv_transfer_params": remote | {"remote_engine_id": "other"}}
    assert (await post(http, second.url + url, wrong))[0] == 500
    # As in vLLM, an answer that has begun as a stream reports its error as an event.
    error, done = await stream(http, second.url + url, wrong | {"stream": True})
    assert (error["error"]["code"], done) == (500, "[DONE]")
    missing = body | {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": "t2"}}
    assert (await post(http, second.url + url, missing))[0] == 500


async def test_two_hundred_streams_at_once(emulate: Starter) -> None:
    engine = await emulate(speedup=10.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        bodies = [
            chat(words_of(str(number), 200, TOKENIZER.words), max_tokens=60, ignore_eos=True, stream=True)
            | {"stream_options": {"include_usage": True}}
            for number in range(200)
        ]
        answers = await asyncio.gather(*(stream(http, f"{engine.url}/v1/chat/completions", body) for body in bodies))
    assert [chunks[-2]["usage"]["completion_tokens"] for chunks in answers] == [60] * 200
    assert engine.model.kv_usage == 0


async def test_the_process_serves_and_ends_on_sigterm() -> None:
    code = "from pointsman_lab.emulator.emulated_engine import EmulateSettings, run; run(EmulateSettings(port=0))"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    try:
        assert process.stdout
        line = (await process.stdout.readline()).decode()
        assert line.startswith("emulated engine http://127.0.0.1:")
        async with aiohttp.ClientSession() as http, http.get(f"{line.split()[-1]}/health") as response:
            assert response.status == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_sleep_aborts_or_keeps_the_open_requests_and_queues_new_ones(
    emulate: Starter, http: aiohttp.ClientSession, mode: str
) -> None:
    engine = await emulate(speedup=1.0)
    chats = f"{engine.url}/v1/chat/completions"
    before = asyncio.create_task(post(http, chats, chat("hello", max_tokens=30, ignore_eos=True)))
    await settled(lambda: engine.model.num_running == 1)
    status, answer = await post(http, f"{engine.url}/sleep?mode={mode}", {})
    assert (status, answer) == (200, {"status": "sleeping", "level": 1})
    async with http.get(f"{engine.url}/is_sleeping") as asleep:
        assert await asleep.json() == {"is_sleeping": True}
    async with http.get(f"{engine.url}/metrics") as page:
        text = await page.text()
    assert 'sleep_state="awake"} 0.0' in text
    assert 'sleep_state="weights_offloaded"} 1.0' in text
    assert 'vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 1.0' in text
    assert before.done() is False or mode == "abort"
    if mode == "abort":
        assert (await before)[1]["choices"][0]["finish_reason"] == "abort"
    new = asyncio.create_task(post(http, chats, chat("hello", max_tokens=2, ignore_eos=True)))
    await settled(lambda: engine.model.num_running + engine.model.num_waiting == (1 if mode == "abort" else 2))
    computed = engine.model.counters.generation_tokens
    status, answer = await post(http, f"{engine.url}/reset_prefix_cache", {})
    assert (status, answer) == (200, {"success": mode == "abort"})
    assert engine.model.counters.generation_tokens == computed
    assert not new.done()
    await post(http, f"{engine.url}/wake_up", {})
    assert (await new)[1]["choices"][0]["finish_reason"] == "length"
    if mode == "keep":
        assert (await before)[1]["usage"]["completion_tokens"] == 30
    status, _ = await post(http, f"{engine.url}/pause?mode=wait", {})
    assert status == 400


async def ill(http: aiohttp.ClientSession, engine: EmulatedEngine, **order: Any) -> None:
    assert await post(http, f"{engine.url}/emulated_illness", order) == (
        200,
        {"for_s": None, "status": 500, "factor": 10.0} | order,
    )


async def test_an_engine_is_ill_as_it_is_told(emulate: Starter, http: aiohttp.ClientSession) -> None:
    engine = await emulate()
    url = f"{engine.url}/v1/chat/completions"
    body = chat("hello", max_tokens=3)
    await ill(http, engine, way="status", status=404)
    status, answer = await post(http, url, body)
    assert (status, answer["error"]["code"]) == (404, 404)
    await ill(http, engine, way="breaks")
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(http, url, body)
    await ill(http, engine, way="hangs")
    waits = asyncio.ensure_future(post(http, url, body))
    async with http.get(f"{engine.url}/health") as answered:
        assert answered.status == 200
    await ill(http, engine, way="stands_still")
    health = asyncio.ensure_future(http.get(f"{engine.url}/health"))
    # An order that follows ends the one before, and what had waited goes on.
    assert (await waits)[0] == 200
    assert not health.done()
    async with http.delete(f"{engine.url}/emulated_illness") as ended:
        assert await ended.json() is None
    async with await health as answered:
        assert answered.status == 200
    await ill(http, engine, way="status", for_s=0.01)
    while (await post(http, url, body))[0] != 200:  # noqa: ASYNC110 - it ends by itself
        await asyncio.sleep(0.005)
    assert (await post(http, f"{engine.url}/emulated_illness", {"way": "dies"}))[0] == 400


async def test_a_slow_engine_takes_as_many_times_as_long(emulate: Starter, http: aiohttp.ClientSession) -> None:
    engine = await emulate()
    await ill(http, engine, way="slow", factor=100.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert (await post(http, f"{engine.url}/v1/chat/completions", chat("hello", max_tokens=10)))[0] == 200
    step_s = engine.model.profile.decode_step_s(1, 1.0) / 20.0
    assert loop.time() - began > 9 * 100 * step_s
