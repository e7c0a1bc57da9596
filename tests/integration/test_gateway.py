"""The gateway over real sockets: answers, errors, and one report for each placed attempt."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import aiohttp
import openai
import pytest
from prometheus_client import generate_latest

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from tests.support.fakes.gateway_peers import MODEL, Stack, refusal, stack
from tests.support.gateway_requests import CHAT, post
from tests.support.waiting import eventually

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# A stream that no other engine can continue without token ids, which these engines do not tell.
ENDS_HERE = CHAT | {"stream": True, "stop": ["no such end"]}


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(tmp_path) as running:
        yield running


def outcomes(up: Stack) -> list[int]:
    return [finish.outcome for finish in up.router.finished]


async def test_an_openai_client_gets_the_engines_answer_and_the_router_its_reports(up: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none") as client:
        raw = await client.chat.completions.with_raw_response.create(**CHAT)
        answer = raw.parse()
    assert answer.choices[0].message.content == "The points are set."
    await up.router.until(lambda: len(up.router.finished) == 1)
    (place,), (done,) = up.router.places, up.router.finished
    ids = up.engines[0].tokenizer.chat(CHAT)
    assert place.input_tokens == len(ids) == done.prompt_tokens
    assert list(place.keys) == prompt_keys(ids, MODEL)
    assert place.tenant == "default"
    assert raw.headers["X-Pointsman-Decision"] == f"d-{place.request_id}"
    assert raw.headers["X-Pointsman-Instance"] == "i0"
    assert up.router.first_tokens == []  # the end of a non-streamed answer reports this, too
    assert (done.outcome, done.cached_tokens, done.output_tokens, done.http_status) == (
        placement_pb2.OUTCOME_OK,
        16,
        4,
        200,
    )
    assert done.finish_reason == placement_pb2.FINISH_REASON_STOP
    assert 0 < done.timings.placed_ms <= done.timings.sent_ms <= done.timings.done_ms
    assert done.timings.first_token_ms == 0, "a non-streamed answer has no separate time of its first token"


async def test_a_stream_reaches_an_openai_client_piece_by_piece(up: Stack) -> None:
    up.engines[0].hold = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        first = await anext(stream)
        assert first.choices[0].delta.content == "The "
        await up.router.until(lambda: len(up.router.first_tokens) == 1)
        assert up.router.finished == []
        up.engines[0].hold.set()
        rest = [chunk async for chunk in stream]
    assert rest[-1].usage is not None
    await up.router.until(lambda: len(up.router.finished) == 1)
    done = up.router.finished[0]
    assert (done.outcome, done.cached_tokens, done.output_tokens) == (placement_pb2.OUTCOME_OK, 16, 4)
    assert done.finish_reason == placement_pb2.FINISH_REASON_STOP


async def test_completions_take_text_and_token_ids(up: Stack) -> None:
    for prompt in ("each train", [5, 6, 7] * 20, ["each train", "the right track"]):
        status, answer, _ = await post(up, "/v1/completions", json={"model": "tiny-alias", "prompt": prompt})
        assert status == 200, answer
    assert up.router.places[1].input_tokens == 60
    assert list(up.router.places[1].keys) == prompt_keys([5, 6, 7] * 20, MODEL)


async def test_of_several_sequences_the_engines_cached_tokens_are_no_evidence(up: Stack) -> None:
    """vLLM tells those of one of them, which may be what another one has just computed."""
    for fields in ({}, {"n": 2}):
        status, answer, _ = await post(up, "/v1/chat/completions", json=CHAT | fields)
        assert status == 200, answer
    await up.router.until(lambda: len(up.router.finished) == 2)
    one, several = up.router.finished
    assert (one.HasField("cached_tokens"), several.HasField("cached_tokens")) == (True, False)
    assert (up.router.places[0].sequences, up.router.places[1].sequences) == (0, 2)
    assert several.prompt_tokens == one.prompt_tokens > 0


async def test_an_image_is_placed_by_the_text_before_it(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
        "{{ '<|im_end|>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
    )
    text = "set the points so that each train takes the right track " * 20

    def chat(url: str, *more: str) -> dict[str, object]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}}
        turns = [[{"type": "text", "text": text}, image], *([{"type": "text", "text": addition}] for addition in more)]
        return {"model": MODEL, "messages": [{"role": "user", "content": turn} for turn in turns]}

    async with stack(tmp_path, template=template) as up:
        for body in (chat("AAAA"), chat("AAAA", "go on"), chat("BBBB")):
            status, answer, _ = await post(up, "/v1/chat/completions", json=body)
            assert status == 200, answer
        first, turn, other = up.router.places
        ids = up.engines[0].tokenizer.text(f"<|im_start|>user\n{text}", add_special_tokens=False)
        assert list(first.keys) == list(turn.keys) == list(other.keys) == prompt_keys(ids, MODEL) != []
        assert first.input_tokens >= len(ids)
        assert first.session_id == turn.session_id != other.session_id


async def test_a_lora_has_keys_of_its_own(up: Stack) -> None:
    status, _, _ = await post(up, "/v1/chat/completions", json=CHAT | {"model": "tiny-lora"})
    assert status == 200
    assert list(up.router.places[0].keys) == prompt_keys(up.engines[0].tokenizer.chat(CHAT), MODEL, "tiny-lora")


async def test_an_instance_that_has_unloaded_the_adapter_is_passed_over(up: Stack) -> None:
    """Its agent sees that some seconds later, and requests may have waited for it."""
    adapter = CHAT | {"model": "tiny-lora"}
    up.engines[0].unloaded = {"tiny-lora"}
    for fields in ({}, {"stream": True}):
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{up.url}/v1/chat/completions", json=adapter | fields) as got,
        ):
            assert (got.status, got.headers["X-Pointsman-Instance"]) == (200, "i1")
            await got.read()
    await up.router.until(lambda: len(up.router.finished) == 4)
    assert outcomes(up) == [placement_pb2.OUTCOME_CANCELLED, placement_pb2.OUTCOME_OK] * 2, "the instance did not fail"
    up.engines[1].unloaded = {"tiny-lora"}
    status, answer, _ = await post(up, "/v1/chat/completions", json=adapter)
    assert (status, answer["error"]["message"]) == (404, "The model `tiny-lora` does not exist.")


async def test_a_client_that_leaves_frees_the_engine_and_the_reservation(up: Stack) -> None:
    up.engines[0].hold = asyncio.Event()
    async with aiohttp.ClientSession() as http:
        answer = await http.post(f"{up.url}/v1/chat/completions", json=CHAT | {"stream": True})
        assert (await answer.content.readline()).startswith(b"data: ")
        answer.close()
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert outcomes(up) == [placement_pb2.OUTCOME_CANCELLED]
    await eventually(lambda: not up.engines[0].open)
    assert up.engines[0].aborted == 1
    assert up.gateway.router.inflight() == {}


async def test_a_client_that_leaves_with_the_whole_answer_did_not_cancel_it(up: Stack) -> None:
    up.engines[0].mode = "linger"
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    async with aiohttp.ClientSession() as http:
        answer = await http.post(f"{up.url}/v1/chat/completions", json=body)
        while (await answer.content.readline()).strip() != b"data: [DONE]":
            pass
        answer.close()
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert outcomes(up) == [placement_pb2.OUTCOME_OK]
    assert up.router.finished[0].cached_tokens == 16
    await eventually(lambda: not up.engines[0].open)
    counted = f'gateway_requests_total{{model="{MODEL}",route="/v1/chat/completions",status="200"}} 1.0'
    await eventually(lambda: counted in generate_latest(up.gateway.telemetry.registry).decode())


async def test_a_client_that_leaves_before_the_placement_is_reported_to_the_router(up: Stack) -> None:
    up.router.placer = lambda request: None
    async with aiohttp.ClientSession() as http:
        waiting = asyncio.create_task(http.post(f"{up.url}/v1/chat/completions", json=CHAT))
        await up.router.until(lambda: len(up.router.places) == 1)
        waiting.cancel()
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert outcomes(up) == [placement_pb2.OUTCOME_CANCELLED]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_instance_is_left_for_another(up: Stack, stream: bool) -> None:
    up.engines[0].mode = "500"
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.with_raw_response.create(**CHAT, stream=stream)
    assert answer.headers["X-Pointsman-Instance"] == "i1"
    await up.router.until(lambda: len(up.router.finished) == 2)
    first, second = up.router.places
    assert second.request_id == f"{first.request_id}.1"
    assert list(second.exclude) == ["i0"]
    assert outcomes(up) == [placement_pb2.OUTCOME_FAILED, placement_pb2.OUTCOME_OK]
    assert up.router.finished[0].http_status == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_what_two_instances_refuse_alike_is_the_requests_own_fault(up: Stack, stream: bool) -> None:
    """No third instance is tried, none is blamed, and the client gets the engine's message with addresses redacted."""
    for engine in up.engines:
        engine.mode = "500"
    up.router.pools[0].instances.add(instance_id="i2", url=up.engines[0].url, incarnation="1")
    status, answer, headers = await post(up, "/v1/chat/completions", json=CHAT | {"user": "me", "stream": stream})
    assert (status, answer["error"]["message"]) == (500, "boom at <address> for me")
    assert headers["Retry-After"] == "3"
    await up.router.until(lambda: len(up.router.finished) == 2)
    assert outcomes(up) == [placement_pb2.OUTCOME_FAILED, placement_pb2.OUTCOME_REJECTED]
    assert [(finish.refused, list(finish.refused_by)) for finish in up.router.finished] == [(True, []), (True, [])]
    assert len(up.router.places) == 2


async def test_an_instance_that_refuses_what_another_answers_is_reported(up: Stack) -> None:
    up.engines[0].mode = "503"
    assert (await post(up, "/v1/chat/completions", json=CHAT))[0] == 200
    await up.router.until(lambda: len(up.router.finished) == 2)
    assert [list(first_token.refused_by) for first_token in up.router.first_tokens] == [["i0"]]
    assert not any(finish.refused_by for finish in up.router.finished), "no instance is blamed twice"


async def test_what_no_engine_of_the_model_can_do_is_asked_of_one(up: Stack) -> None:
    up.engines[0].mode = "501"
    status, answer, _ = await post(up, "/v1/chat/completions", json=CHAT)
    assert (status, len(up.router.places)) == (501, 1)
    assert "boom" in answer["error"]["message"]


async def test_an_answer_that_is_too_long_is_made_once(up: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_gateway.io.engines.engine_client.MAX_ANSWER_BYTES", 100)
    status, answer, _ = await post(up, "/v1/chat/completions", json=CHAT)
    assert (status, answer["error"]["code"]) == (502, "too_long")
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert outcomes(up) == [placement_pb2.OUTCOME_REJECTED]
    assert len(up.engines[0].requests) == 1


async def test_a_refused_connection_is_left_for_another_and_no_address_shows(up: Stack) -> None:
    for ref in up.router.pools[0].instances:
        ref.url = "http://127.0.0.1:1"
    status, answer, _ = await post(up, "/v1/chat/completions", json=CHAT)
    assert status == 502
    assert "127.0.0.1" not in json.dumps(answer)
    await up.router.until(lambda: len(up.router.finished) == 2)
    assert outcomes(up) == [placement_pb2.OUTCOME_FAILED] * 2
    assert "127.0.0.1" not in "".join(finish.error for finish in up.router.finished)


@pytest.mark.parametrize("mode", ["cut", "short"])
async def test_an_instance_that_dies_while_it_answers_ends_the_stream_with_an_error(up: Stack, mode: str) -> None:
    up.engines[0].mode = mode
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{up.url}/v1/chat/completions", json=ENDS_HERE) as answer,
    ):
        body = await answer.read()
    assert b"[DONE]" not in body
    assert json.loads(body.strip().splitlines()[-1].removeprefix(b"data: "))["error"]["code"] == 502
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert outcomes(up) == [placement_pb2.OUTCOME_FAILED]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_what_an_instance_gives_up_before_its_first_word_is_answered_by_another(
    up: Stack, path: str, stream: bool
) -> None:
    up.engines[0].mode = "stopped"
    async with (
        aiohttp.ClientSession() as http,
        http.post(up.url + path, json=CHAT | {"max_tokens": 64, "stream": stream}) as answer,
    ):
        body = await answer.read()
    assert answer.headers["X-Pointsman-Instance"] == "i1"
    assert b"abort" not in body
    assert b"The " in body
    await up.router.until(lambda: len(up.router.finished) == 2)
    assert outcomes(up) == [placement_pb2.OUTCOME_FAILED, placement_pb2.OUTCOME_OK]


async def test_a_stream_that_an_instance_gives_up_ends_with_an_error(up: Stack) -> None:
    up.engines[0].mode, up.engines[0].hold = "stopped", asyncio.Event()
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{up.url}/v1/chat/completions", json=ENDS_HERE) as answer,
    ):
        first = await answer.content.readuntil(b"\n\n")
        up.engines[0].hold.set()
        error = await answer.content.readuntil(b"\n\n")
    # The client disconnects at the error, as official clients do.
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == "The "
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 502
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert outcomes(up) == [placement_pb2.OUTCOME_FAILED]


async def test_the_engines_own_refusal_is_passed_on(up: Stack) -> None:
    up.engines[0].mode = "400"
    status, answer, _ = await post(up, "/v1/chat/completions", json=CHAT)
    assert (status, answer["error"]["message"]) == (400, "no")
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert outcomes(up) == [placement_pb2.OUTCOME_REJECTED]


JSON = {"Content-Type": "application/json"}
BAD = [
    ("malformed", b'{"model": ', JSON, 400, "invalid_json"),
    ("unknown model", json.dumps(CHAT | {"model": "other"}).encode(), JSON, 404, "model_not_found"),
    ("negative max_tokens", json.dumps(CHAT | {"max_tokens": -1}).encode(), JSON, 400, "invalid_value"),
    ("content type", json.dumps(CHAT).encode(), {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
    (
        "more output than context",
        json.dumps(CHAT | {"max_tokens": 4097}).encode(),
        JSON,
        400,
        "context_length_exceeded",
    ),
    (
        "over-long prompt",
        json.dumps(CHAT | {"messages": [{"role": "user", "content": "ab " * 9000}]}).encode(),
        JSON,
        400,
        "context_length_exceeded",
    ),
    ("body over the limit", b" " * 100_001, JSON, 413, "body_too_large"),
]


async def test_bad_input_is_refused_with_nothing_placed(tmp_path: Path) -> None:
    async with stack(tmp_path, max_body_bytes=100_000) as up:
        for name, body, headers, status, code in BAD:
            got, answer, _ = await post(up, "/v1/chat/completions", data=body, headers=headers)
            assert (got, answer["error"]["code"]) == (status, code), name
            assert answer["error"]["type"] == "invalid_request_error"
        encoded = JSON | {"Content-Encoding": "br"}
        got, answer, answer_headers = await post(up, "/v1/chat/completions", data=b"no br", headers=encoded)
        assert (got, answer_headers["Accept-Encoding"]) == (415, "zstd, gzip, deflate"), answer
        zipped = JSON | {"Content-Encoding": "gzip"}
        whole = gzip.compress(json.dumps(CHAT).encode())
        for body, status, code in (
            (b"no gzip", 400, "bad_encoding"),
            (whole[:-5], 400, "bad_encoding"),
            (b"", 400, "invalid_json"),
            (gzip.compress(b" " * 100_001), 413, "body_too_large"),
            (gzip.compress(b" " * 100_000_000), 413, "body_too_large"),
        ):
            got, answer, _ = await post(up, "/v1/chat/completions", data=body, headers=zipped)
            assert (got, answer["error"]["code"]) == (status, code), body[:20]
        assert (await post(up, "/collective_rpc", json={}))[0] == 404
        got, answer, _ = await post(up, "/chat/completions", json=CHAT)
        assert (got, answer["error"]["message"]) == (404, "Unknown path. Is /v1/chat/completions meant?")
        async with aiohttp.ClientSession() as http, http.get(f"{up.url}/v1/chat/completions") as refused:
            assert (refused.status, refused.headers["Allow"]) == (405, "POST")
            assert "error" in await refused.json()
        # Codex tries it at each start, and again after each status but this one.
        socket = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{up.url}/v1/responses", headers=socket, allow_redirects=False) as refused,
        ):
            assert (refused.status, (await refused.json())["error"]["code"]) == (426, "upgrade_required")
        assert up.router.places == []
        assert all(engine.requests == [] for engine in up.engines)


@pytest.mark.parametrize("encoding", ["", "identity", "gzip", "deflate", "zstd"])
async def test_compressed_bodies_are_read(up: Stack, encoding: str) -> None:
    packings: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress
    }  # fmt: skip
    body = packings.get(encoding, bytes)(json.dumps(CHAT | {"user": "me"}).encode())
    status, _, _ = await post(up, "/v1/chat/completions", data=body, headers=JSON | {"Content-Encoding": encoding})
    assert status == 200
    _, sent, headers = up.engines[0].requests[-1]
    assert (sent["user"], "Content-Encoding" in headers) == ("me", False)


async def test_vllms_small_routes_answer(up: Stack) -> None:
    async with aiohttp.ClientSession() as http:
        for path, found in (
            ("/ping", "status"),
            ("/version", "version"),
            ("/load", "server_load"),
            ("/v1/models/", "data"),
        ):
            async with http.get(up.url + path) as answer:
                assert (answer.status, found in await answer.json()) == (200, True), path
        async with http.get(f"{up.url}/v1/models") as answer:
            cards = (await answer.json())["data"]
    assert [card["max_input_tokens"] for card in cards] == [card["max_model_len"] for card in cards] != []
    # Anthropic's API has these in each card; null is "not known". A client that took the context for `max_tokens` would ask
    # for more than it leaves.
    assert {(card["max_tokens"], card["capabilities"]) for card in cards} == {(None, None)}
    status, _, _ = await post(up, "/v1/chat/completions/", json=CHAT)
    assert status == 200


async def test_output_is_bounded_by_the_room_behind_the_prompt(up: Stack) -> None:
    """As in vLLM: a request for more output than fits gets as much as fits. The limit is the client's: which context it fits in
    depends on the instance."""
    long = CHAT | {"messages": [{"role": "user", "content": "ab " * 1_200}]}
    for asked in (4_096, 1, None):
        assert (await post(up, "/v1/chat/completions", json=long | {"max_tokens": asked}))[0] == 200
    prompt = up.router.places[0].input_tokens
    assert 2_048 < prompt < 4_096
    assert [place.max_output_tokens for place in up.router.places] == [4_096, 1, 0]
    assert [body["max_tokens"] for _, body, _ in up.engines[0].requests] == [4_096, 1, None]


async def test_all_prompts_of_a_completion_count(up: Stack) -> None:
    prompts = ["set the points"] * 200
    assert (await post(up, "/v1/completions", json={"model": MODEL, "prompt": prompts}))[0] == 200
    (place,) = up.router.places
    each = len(up.engines[0].tokenizer.text(prompts[0], add_special_tokens=True))
    assert place.input_tokens == 200 * each
    assert place.sliceable_tokens == 0


async def test_an_echo_without_output_reaches_the_engine(up: Stack) -> None:
    asked = {"model": MODEL, "prompt": "set the points", "echo": True, "max_tokens": 0}
    assert (await post(up, "/v1/completions", json=asked))[0] == 200
    assert up.router.places[0].max_output_tokens == 1
    assert up.engines[0].requests[0][1]["max_tokens"] == 0


@pytest.mark.parametrize("given", ["mine", ""])
async def test_every_answer_carries_its_requests_id(up: Stack, given: str) -> None:
    own = {"X-Request-ID": given} if given else {}
    head = JSON | own
    answers = [
        await post(up, "/v1/chat/completions", json=CHAT, headers=head),
        await post(up, "/v1/chat/completions", data=b"{", headers=head),
        await post(up, "/v1/chat/completions", data=io.BytesIO(b"x" * (40 << 20)), headers=head),
        await post(up, "/v1/detokenize", data=b"{}", headers=head),
        await post(up, "/detokenize", json={"model": MODEL, "tokens": [1]}, headers=head),
    ]
    assert [status for status, _, _ in answers] == [200, 400, 413, 404, 200]
    ids = [headers["X-Request-ID"] for _, _, headers in answers]
    assert ids == ["mine"] * 5 if given else len(set(ids)) == 5
    if not given:
        assert ids[0] == up.router.places[0].request_id


async def test_refusals_become_http_errors_with_retry_after(up: Stack) -> None:
    for code, wait, status in ((14, 0, 503), (8, 7, 429), (5, 0, 503)):
        up.router.placer = partial(refusal, code=code, message="no", wait_s=wait)
        got, _, headers = await post(up, "/v1/chat/completions", json=CHAT)
        assert got == status
        assert headers.get("Retry-After") == {14: "1", 8: "7", 5: "1"}[code]
    assert up.router.finished == []
    assert all(engine.requests == [] for engine in up.engines)


async def test_what_a_client_may_not_set_never_reaches_an_engine(up: Stack) -> None:
    evil = {"do_remote_prefill": True}
    body = CHAT | {
        "kv_transfer_params": evil,
        "ec_transfer_params": evil,
        "priority": -5,
        "cache_salt": "mine",
        "vllm_xargs": {"kv_transfer_params": "x", "kv_cache_report_mode": "full", "mine": 1},
        "top_k": 3,
    }
    headers = {"X-Vllm-Priority": "-5", "X-data-parallel-rank": "3", "X-Session-ID": "abc", "traceparent": "00-1-2-01"}
    status, _, _ = await post(up, "/v1/chat/completions", json=body, headers=headers)
    assert status == 200
    ((_, seen, seen_headers),) = up.engines[0].requests
    assert seen == CHAT | {"vllm_xargs": {"mine": 1}, "top_k": 3}
    lower = {name.lower(): value for name, value in seen_headers.items()}
    assert "x-vllm-priority" not in lower
    assert "x-data-parallel-rank" not in lower
    assert (lower["x-session-id"], lower["traceparent"]) == ("abc", "00-1-2-01")
    assert list(up.router.places[0].keys) == prompt_keys(up.engines[0].tokenizer.chat(CHAT), MODEL)


async def test_a_clean_body_is_forwarded_as_it_came(up: Stack) -> None:
    raw = b'{ "messages":[{"role":"user","content":"\\u00fc"}],  "model":"tiny" }'
    seen: list[bytes] = []
    original = up.gateway._upstream.send

    async def spy(target: object, method: str, path: str, payload: bytes, headers: object) -> object:
        seen.append(payload)
        return await original(target, method, path, payload, headers)

    up.gateway._upstream.send = spy
    status, _, _ = await post(up, "/v1/chat/completions", data=raw, headers=JSON)
    assert (status, seen) == (200, [raw])


async def test_turns_of_a_chat_continue_its_session(up: Stack) -> None:
    messages = list(CHAT["messages"])
    await post(up, "/v1/chat/completions", json=CHAT)
    messages += [{"role": "assistant", "content": "The points are set."}, {"role": "user", "content": "Again."}]
    await post(up, "/v1/chat/completions", json=CHAT | {"messages": messages})
    await post(
        up, "/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": "something else " * 9}]}
    )
    await post(up, "/v1/chat/completions", json=CHAT | {"session_id": "body"}, headers={"X-Session-ID": "header"})
    first, second, third, named = [place.session_id for place in up.router.places]
    assert first == second != third
    assert named == "header"
    assert up.engines[0].requests[0][2]["X-Session-ID"] == first


async def test_a_dry_run_explains_and_sends_nothing(up: Stack) -> None:
    status, answer, _ = await post(up, "/v1/chat/completions", json=CHAT, headers={"X-Pointsman-Dry-Run": "1"})
    assert (status, answer["decision"]["decision_id"]) == (200, "d-1")
    assert up.router.explained[0].input_tokens == len(up.engines[0].tokenizer.chat(CHAT))
    assert up.router.places == []
    assert all(engine.requests == [] for engine in up.engines)


async def test_models_health_and_metrics_tell_what_is_there(up: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "tiny-alias", "tiny-lora"]
    await post(up, "/v1/chat/completions", json=CHAT)
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{up.url}/health") as answer:
            body = await answer.json()
            assert (answer.status, body["status"]) == (200, "ok")
            assert body["models"][MODEL]["exact"] is True
        async with http.get(f"{up.url}/metrics") as answer:
            text = await answer.text()
    assert 'pointsman_gateway_tokenizer_exact{model="tiny"} 1.0' in text
    assert 'pointsman_gateway_requests_total{model="tiny",route="/v1/chat/completions",status="200"} 1.0' in text
    assert "pointsman_gateway_open_requests 0.0" in text


async def test_a_next_step_that_does_not_come_in_time_is_done_without_and_reported(tmp_path: Path) -> None:
    async with stack(tmp_path, placement_timeout_s=1.0) as up:
        one, other = up.router.pools[0].instances

        def sliced(request: placement_pb2.PlacementRequest) -> placement_pb2.Placement:
            step = placement_pb2.Step(kind=placement_pb2.STEP_KIND_PREFILL, instance=one, prefix_tokens=16)
            return placement_pb2.Placement(request_id=request.request_id, decision_id="d", step=step)

        up.router.placer = sliced
        up.router.late = True
        late = placement_pb2.Step(index=1, kind=placement_pb2.STEP_KIND_SERVE, instance=other)
        up.router.next_steps = [placement_pb2.Placement(decision_id="d", step=late, last=True)]
        status, _, _ = await post(up, "/v1/chat/completions", json=CHAT)
        assert status == 200
        await up.router.until(lambda: len(up.router.finished) == 1)
        assert 0 < up.router.step_dones[0].deadline.ToMilliseconds() <= 1_000
        [alone] = up.router.open_streams
        assert (alone.instance_id, alone.cached_tokens) == ("i0", 16)
        assert alone.request.request_id == up.router.finished[0].request_id
        # Once its next request is answered, the gateway has received the late step.
        up.router.placer = up.router.first
        assert (await post(up, "/v1/chat/completions", json=CHAT))[0] == 200
        assert len(up.engines[0].requests) == 3
        assert up.engines[1].requests == []
        assert [finish.outcome for finish in up.router.finished[:1]] == [placement_pb2.OUTCOME_OK]


async def test_slices_come_before_the_serve_step(up: Stack) -> None:
    one, _ = up.router.pools[0].instances
    one.data_parallel_rank = 2

    def step(index: int, tokens: int) -> placement_pb2.Placement:
        kind = placement_pb2.STEP_KIND_PREFILL if tokens else placement_pb2.STEP_KIND_SERVE
        given = placement_pb2.Step(index=index, kind=kind, instance=one, prefix_tokens=tokens)
        return placement_pb2.Placement(decision_id="d", step=given, last=not tokens)

    def sliced(request: placement_pb2.PlacementRequest) -> placement_pb2.Placement:
        first = step(0, 8)
        first.request_id = request.request_id
        return first

    up.router.placer = sliced
    up.router.next_steps = [step(1, 16), step(2, 0)]
    status, _, headers = await post(up, "/v1/chat/completions", json=CHAT, headers={"X-Session-ID": "s1"})
    assert (status, headers["X-Pointsman-Instance"]) == (200, "i0")
    slices, ids = up.engines[0].requests[:2], up.engines[0].tokenizer.chat(CHAT)
    assert [path for path, _, _ in slices] == ["/v1/completions"] * 2
    assert [body["prompt"] for _, body, _ in slices] == [ids[:8], ids[:16]]
    for _, body, sent in slices:
        assert (body["model"], body["max_tokens"], body["stream"]) == (CHAT["model"], 1, False)
        assert (sent["X-data-parallel-rank"], sent["X-Session-ID"]) == ("2", "s1")
    await up.router.until(lambda: len(up.router.finished) == 1)
    assert [(done.step_index, done.ok) for done in up.router.step_dones] == [(0, True), (1, True)]
    assert outcomes(up) == [placement_pb2.OUTCOME_OK]
