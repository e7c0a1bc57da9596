"""The newer APIs through the gateway, called with the vendors' own clients where these exist."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_gateway.core.api import ROUTES, Endpoint, parse
from pointsman_gateway.core.stored_responses import response_id
from pointsman_gateway.io.request import unplaced_proxy
from tests.support.fakes.gateway_peers import EMBEDDING, MODEL, Prefilling, Stack, refusal, stack
from tests.support.gateway_requests import BODIES, MESSAGES, RESPONSES, WORDS, ask, claude, finished, gpt
from tests.support.waiting import eventually

PLACED = [kind for kind in Endpoint if kind.is_placed]


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack(tmp_path) as running:
        yield running


def assert_exact(up: Stack, kind: Endpoint, body: dict[str, Any], done: placement_pb2.Finished) -> None:
    """Check that the request was placed by the exact tokens that the engine counts, and reported with the engine's counts."""
    ids = up.engines[0].tokenizer.prompt(parse(kind, json.dumps(body).encode())).ids
    place = up.router.places[-1]
    assert list(place.keys) == list(prompt_keys(ids.tolist(), MODEL)) != []
    assert place.input_tokens == done.prompt_tokens == len(ids)
    assert (done.outcome, done.cached_tokens, done.output_tokens) == (placement_pb2.OUTCOME_OK, 16, 4)
    assert done.finish_reason == placement_pb2.FINISH_REASON_STOP


async def test_anthropics_client_gets_messages(up: Stack) -> None:
    async with claude(up) as client:
        answer = await client.messages.create(**MESSAGES)
        assert answer.content[0].text == "The points are set."
        assert_exact(up, Endpoint.MESSAGES, MESSAGES, await finished(up))
        async with client.messages.stream(**MESSAGES) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert (text, final.stop_reason, final.usage.output_tokens) == ("The points are set.", "end_turn", 4)
        assert_exact(up, Endpoint.MESSAGES, MESSAGES, await finished(up, 2))
        assert (await client.messages.count_tokens(**BODIES[Endpoint.COUNT_TOKENS])).input_tokens == 9
    assert len(up.router.places) == 2
    assert [path for path, _, _ in up.engines[0].requests].count("/v1/messages") == 2


async def test_openais_client_gets_responses(up: Stack) -> None:
    async with gpt(up) as client:
        answer = await client.responses.create(**RESPONSES)
        assert answer.output_text == "The points are set."
        assert_exact(up, Endpoint.RESPONSES, RESPONSES, await finished(up))
        events = [event async for event in await client.responses.create(**RESPONSES, stream=True)]
    assert [event.type for event in events][0::7] == ["response.created", "response.completed"]
    assert_exact(up, Endpoint.RESPONSES, RESPONSES, await finished(up, 2))


@pytest.mark.parametrize("kind", [Endpoint.RESPONSES, Endpoint.CHAT, Endpoint.COMPLETION])
async def test_what_an_engine_streams_before_it_computes_the_prompt_is_no_first_token(
    tmp_path: Path, kind: Endpoint
) -> None:
    async with stack(tmp_path, engine=Prefilling) as up, aiohttp.ClientSession() as http:
        first, second = up.engines
        assert isinstance(first, Prefilling)
        assert isinstance(second, Prefilling)
        first.mode = "cut"

        async def read() -> bytes:
            async with http.post(up.url + kind.value, json=BODIES[kind] | {"stream": True}) as answer:
                return await answer.read()

        asking = asyncio.create_task(read())
        await eventually(lambda: first.prefilling)
        first.gate.set()
        await eventually(lambda: second.prefilling)
        assert up.router.first_tokens == []
        second.gate.set()
        raw = await asking
        assert raw.count(b"set.") >= 1
        assert raw.count(b"response.created") == (2 if kind is Endpoint.RESPONSES else 0), (
            "the event's name and its type"
        )
        await finished(up, 2)
        outcomes = [placement_pb2.OUTCOME_FAILED, placement_pb2.OUTCOME_OK]
        assert [finish.outcome for finish in up.router.finished] == outcomes
        assert [token.request_id for token in up.router.first_tokens] == [up.router.places[1].request_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_repeats_its_requests_metadata_is_no_abort(up: Stack, stream: bool) -> None:
    async with gpt(up) as client:
        body: dict[str, Any] = RESPONSES | {"metadata": {"finish_reason": "abort"}, "stream": stream}
        answer: Any = await client.responses.create(**body)
        last = [event async for event in answer][-1].response if stream else answer
    assert (last.status, last.metadata) == ("completed", {"finish_reason": "abort"})
    assert (await finished(up)).outcome == placement_pb2.OUTCOME_OK
    assert len(up.router.places) == 1


async def test_a_stored_response_is_found_by_its_id_alone(up: Stack, tmp_path: Path) -> None:
    up.engines[0].mode = "500"  # the first response ends up on the second instance
    async with gpt(up) as client:
        first = await client.responses.create(**RESPONSES)
        up.engines[0].mode = "ok"
        assert first.id in up.engines[1].stored
        second = await client.responses.create(**RESPONSES, previous_response_id=first.id)
        assert list(up.router.places[-1].exclude) == ["i0"]
        assert up.engines[1].requests[-1][1]["previous_response_id"] == first.id
        assert list(up.router.places[-1].keys) == []
        # The id names the instance and gateways keep no state of responses, so another gateway finds it, too.
        assert second.id.startswith(response_id("i1", "1", "default", "")[:25])
        assert (await client.responses.retrieve(second.id)).id == second.id
        assert (await client.responses.cancel(second.id)).status == "cancelled"
        seen = [path for path, _, _ in up.engines[1].requests[-2:]]
        assert seen == [f"/v1/responses/{second.id}", f"/v1/responses/{second.id}/cancel"]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_unknown")
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**RESPONSES, previous_response_id="resp_unknown")
    status, _ = await ask(up, f"/v1/responses/{second.id}?stream=false&starting_after=1&evil=1")
    assert status == 200
    assert up.engines[1].requests[-1][0].endswith("?stream=false&starting_after=1")
    assert all(
        request["request_id"] != "resp_own" for _, request, _ in up.engines[1].requests if "request_id" in request
    )
    # Ends are reported in batches, a few milliseconds late.
    await eventually(lambda: not up.router.reserved, "no reservation is left")


async def test_without_a_router_a_stored_response_is_continued_where_it_is(up: Stack) -> None:
    up.engines[0].mode = "500"
    async with gpt(up) as client:
        first = await client.responses.create(**RESPONSES)
        up.engines[0].mode = "ok"
        await up.router.stop()
        await eventually(lambda: not up.gateway.router.connected)
        for _ in range(3):
            await client.responses.create(**RESPONSES, previous_response_id=first.id)
    assert len(up.engines[1].requests) == 4


async def test_texts_are_embedded_ranked_and_scored(up: Stack) -> None:
    async with gpt(up) as client:
        answer = await client.embeddings.create(**BODIES[Endpoint.EMBEDDINGS], encoding_format="float")
    assert answer.data[0].embedding == [0.5, -0.5]
    done, place = await finished(up), up.router.places[0]
    assert (done.outcome, done.prompt_tokens) == (placement_pb2.OUTCOME_OK, 9)
    assert (list(place.keys), place.session_id, place.max_output_tokens) == ([], "", 1)
    assert place.input_tokens == pytest.approx(len(WORDS) // 4, abs=10)
    for path, kind in ROUTES.items():
        if kind.is_placed and not kind.generates:
            status, answer = await ask(up, path, BODIES[kind])
            assert status == 200, path
            assert up.engines[0].requests[-1][0] == kind.value
    assert up.router.first_tokens == [], "the end of a non-streamed answer also reports that it began"
    assert up.gateway.router.inflight() == {}


@pytest.mark.parametrize("kind", [Endpoint.EMBEDDINGS, Endpoint.POOLING])
@pytest.mark.parametrize("encoding", ["bytes", "bytes_only"])
async def test_embeddings_in_bytes_are_an_answer(up: Stack, kind: Endpoint, encoding: str) -> None:
    body = {**BODIES[kind], "encoding_format": encoding}
    async with aiohttp.ClientSession() as session, session.post(up.url + kind.value, json=body) as answer:
        assert (answer.status, await answer.read()) == (200, EMBEDDING)
        assert answer.content_type == "application/octet-stream"
        assert ("metadata" in answer.headers) == (encoding == "bytes")
    done = await finished(up)
    assert (done.outcome, len(up.engines[0].requests)) == (placement_pb2.OUTCOME_OK, 1)
    if encoding == "bytes":
        assert done.prompt_tokens == 9


async def test_tokens_are_any_instances_to_tell(up: Stack) -> None:
    assert (await ask(up, "/tokenize", BODIES[Endpoint.TOKENIZE]))[1]["count"] >= 1
    assert await ask(up, "/detokenize", BODIES[Endpoint.DETOKENIZE]) == (200, {"prompt": "x"})
    for engine in up.engines:
        engine.mode = "500"
    status, answer = await ask(up, "/v1/messages/count_tokens", BODIES[Endpoint.COUNT_TOKENS])
    assert (status, answer["error"]["type"]) == (500, "api_error")
    assert "10.0.0.7" not in str(answer)
    up.engines[1].mode = "ok"
    for _ in range(2):
        assert (await ask(up, "/v1/messages/count_tokens", BODIES[Endpoint.COUNT_TOKENS]))[0] == 200
    assert up.router.places == []


async def test_when_to_ask_again_is_told_as_the_engine_tells_it(up: Stack) -> None:
    async with gpt(up) as client:
        made = await client.responses.create(**RESPONSES)
    for engine in up.engines:
        engine.mode = "503"
    counted = up.url + "/v1/messages/count_tokens"
    async with aiohttp.ClientSession() as session:
        async with session.post(counted, json=BODIES[Endpoint.COUNT_TOKENS]) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "3")
            assert (await answer.json())["error"] == {"type": "overloaded_error", "message": "scaling at <address>"}
        async with session.get(f"{up.url}/v1/responses/{made.id}") as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "3")


async def test_an_engine_that_does_not_answer_delays_few_that_are_not_placed(
    up: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body, silent = "/v1/messages/count_tokens", BODIES[Endpoint.COUNT_TOKENS], up.engines[0]
    silent.mode = "hang"
    waiting = [asyncio.create_task(ask(up, path, body)) for _ in range(2)]
    await eventually(lambda: silent.open == 1)
    # While one waits there, those that come one after the other go to another.
    for _ in range(8):
        assert (await ask(up, path, body))[0] == 200
    assert len(silent.requests) == 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await eventually(lambda: silent.open == 0)
    monkeypatch.setattr(unplaced_proxy, "ANOTHER_S", 0.2)
    assert {status for status, _ in await asyncio.gather(*(ask(up, path, body) for _ in range(16)))} == {200}
    # It is asked no more for a while.
    before = len(silent.requests)
    for _ in range(8):
        assert (await ask(up, path, body))[0] == 200
    assert len(silent.requests) == before
    # The only one is asked all the same.
    silent.mode = up.engines[1].mode = "ok"
    del up.router.pools[0].instances[1:]
    await up.router.tell_fleet()
    await eventually(lambda: len(up.gateway.pools.states()[0].pool.instances) == 1)
    assert (await ask(up, path, body))[0] == 200
    assert len(silent.requests) == before + 1


@pytest.mark.parametrize("path", ["/detokenize", "/v1/responses/ID?stream=true", "/v1/responses/ID"])
@pytest.mark.parametrize("late", [False, True], ids=["the client leaves", "no answer in time"])
async def test_what_is_not_placed_leaves_no_connection_open(tmp_path: Path, path: str, late: bool) -> None:
    async with stack(tmp_path, engines=1, first_byte_timeout_s=1.0 if late else 60.0) as up, gpt(up) as client:
        path = path.replace("ID", (await client.responses.create(**RESPONSES)).id)
        up.engines[0].mode = "hang"
        body = BODIES[Endpoint.DETOKENIZE] if path == "/detokenize" else None
        asking = asyncio.create_task(ask(up, path, body))
        await eventually(lambda: up.engines[0].open == 1)
        if late:
            assert (await asking)[0] == 502
        else:
            asking.cancel()
        await eventually(lambda: up.engines[0].open == 0)


async def test_head_of_a_stored_response_has_no_body(up: Stack) -> None:
    async with gpt(up) as client:
        made = await client.responses.create(**RESPONSES)
    host, _, port = up.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"HEAD /v1/responses/{made.id}?stream=true HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n"), "nothing may follow the head"


@pytest.mark.parametrize("kind", PLACED)
async def test_what_a_client_may_not_set_reaches_no_engine_on_any_api(up: Stack, kind: Endpoint) -> None:
    evil = {"kv_transfer_params": {"do_remote_prefill": True}, "ec_transfer_params": {}, "priority": -1}
    evil |= {"vllm_xargs": {"kv_transfer_params": "x", "mine": 1}, "cache_salt": "theirs", "request_id": "resp_x"}
    status, _ = await ask(up, kind.value, {**BODIES[kind], **evil, "unknown": [1]}, **{"X-Vllm-Priority": "-9"})
    assert status == 200
    ((_, seen, headers),) = up.engines[0].requests
    assert seen["vllm_xargs"] == {"mine": 1}
    assert seen["unknown"] == [1]
    assert not {"kv_transfer_params", "ec_transfer_params", "priority", "cache_salt"} & seen.keys()
    assert kind is not Endpoint.RESPONSES or seen["request_id"] != "resp_x"
    assert "x-vllm-priority" not in {name.lower() for name in headers}


async def test_errors_take_the_form_of_the_api(up: Stack) -> None:
    async with claude(up) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**MESSAGES | {"model": "other"})
        assert unknown.value.body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "The model `other` does not exist."},
            "request_id": unknown.value.request_id,
        }
        # The path of models is both vendors'.
        with pytest.raises(anthropic.NotFoundError) as no_model:
            await client.models.retrieve("other")
        assert no_model.value.body == unknown.value.body | {"request_id": no_model.value.request_id}
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**MESSAGES | {"max_tokens": 4_097})
        up.router.placer = lambda request: refusal(request, 8, "full", 7)
        with pytest.raises(anthropic.RateLimitError) as full:
            await client.messages.create(**MESSAGES)
        assert full.value.response.headers["Retry-After"] == "7"
    async with gpt(up) as openai_client:
        with pytest.raises(openai.RateLimitError) as also_full:
            await openai_client.responses.create(**RESPONSES)
        assert also_full.value.code == "saturated"
    for path, method in (("/v1/messages", "GET"), ("/v1/messages/batches", "POST")):
        async with aiohttp.ClientSession() as http, http.request(method, up.url + path, json={}) as answer:
            assert answer.status in (404, 405)
            found = await answer.json()
            assert (found["type"], found["request_id"]) == ("error", answer.headers["request-id"])


async def test_an_engines_own_refusal_takes_the_form_too(up: Stack) -> None:
    up.engines[0].mode = "400"
    async with claude(up) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**MESSAGES)
    error = {"type": "invalid_request_error", "message": "no"}
    assert refused.value.body == {"type": "error", "error": error, "request_id": refused.value.request_id}
    assert (await finished(up)).outcome == placement_pb2.OUTCOME_REJECTED


@pytest.mark.parametrize("mode", ["cut", "short"])
async def test_a_stream_that_breaks_ends_with_the_apis_own_error_event(up: Stack, mode: str) -> None:
    up.engines[0].mode = mode
    async with claude(up) as client:
        with pytest.raises(anthropic.APIStatusError, match="instance failed"):
            [event async for event in await client.messages.create(**MESSAGES, stream=True)]
    async with gpt(up) as openai_client:
        events = [event async for event in await openai_client.responses.create(**RESPONSES, stream=True)]
    assert events[-1].type == "error"
    assert events[-1].code == "instance_failed"
    assert events[-1].sequence_number == events[-2].sequence_number + 1
    await finished(up, 2)
    assert [finish.outcome for finish in up.router.finished] == [placement_pb2.OUTCOME_FAILED] * 2


@pytest.mark.parametrize("kind", [Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.MESSAGES, Endpoint.RESPONSES])
async def test_an_engines_own_error_in_a_stream_names_no_address(up: Stack, kind: Endpoint) -> None:
    up.engines[0].mode = "confess"
    body = BODIES[kind] | {"stream": True}
    if kind in (Endpoint.CHAT, Endpoint.COMPLETION):
        body |= {"stop": ["no such end"]}  # else another engine would go on by the text
    async with aiohttp.ClientSession() as http, http.post(up.url + kind.value, json=body) as answer:
        text = (await answer.read()).decode()
    assert "10.0.0.7" not in text
    assert text.count("boom at <address>") == 1
    assert ("event: error\n" in text) == (kind in (Endpoint.MESSAGES, Endpoint.RESPONSES))
    done = await finished(up)
    assert (done.outcome, done.error) == (placement_pb2.OUTCOME_FAILED, "the engine reported an error")


@pytest.mark.parametrize("kind", [Endpoint.MESSAGES, Endpoint.RESPONSES])
async def test_a_client_that_leaves_frees_the_engine(up: Stack, kind: Endpoint) -> None:
    up.engines[0].hold = asyncio.Event()
    async with aiohttp.ClientSession() as http:
        answer = await http.post(up.url + kind.value, json=BODIES[kind] | {"stream": True})
        assert (await answer.content.readline()).startswith(b"event: ")
        answer.close()
    assert (await finished(up)).outcome == placement_pb2.OUTCOME_CANCELLED
    await eventually(lambda: not up.engines[0].open)
    assert up.router.reserved == set()


async def test_aliases_are_listed_and_resolved(tmp_path: Path) -> None:
    async with stack(tmp_path, aliases=["big=tiny", "gone=nobody"]) as up:
        async with gpt(up) as client:
            assert [model.id async for model in client.models.list()] == ["big", "tiny", "tiny-alias", "tiny-lora"]
            retrieved = await client.models.retrieve("big")
            # Agents read the context length from the field that vLLM uses.
            assert (retrieved.id, retrieved.model_extra and retrieved.model_extra["max_model_len"]) == ("big", 4096)
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gone")
            answer = await client.chat.completions.create(**BODIES[Endpoint.CHAT] | {"model": "big"})
            assert answer.model == MODEL
        async with claude(up) as other:
            assert (await anext(aiter(other.models.list()))).id == "big"
            await other.messages.create(**MESSAGES | {"model": "big"})
        assert {body["model"] for _, body, _ in up.engines[0].requests} == {MODEL}
        assert {place.model for place in up.router.places} == {MODEL}
        status, answer = await ask(up, "/v1/chat/completions", BODIES[Endpoint.CHAT] | {"model": "gone"})
        assert (status, answer["error"]["message"]) == (404, "The model `gone` does not exist.")
