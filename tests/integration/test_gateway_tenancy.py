"""Keys, their limits and their salts, through the gateway."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from prometheus_client import generate_latest

from pointsman_common.core.block_keys import prompt_keys
from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.io import routes
from pointsman_gateway.io.api_keys import LOOK_AGAIN_S
from tests.support.fakes.gateway_peers import MODEL, Stack, stack
from tests.support.gateway_requests import BODIES, MESSAGES, RESPONSES, ask, claude, finished, gpt
from tests.support.waiting import eventually

CHAT = BODIES[Endpoint.CHAT]


async def status_of(up: Stack, key: str, body: dict[str, Any] = CHAT, path: str = Endpoint.CHAT.value) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(up.url + path, json=body) as answer:
        await answer.read()
        return answer.status


def error_of(refused: anthropic.APIStatusError) -> dict[str, str]:
    """The error in the body of a refusal, in the form of Messages."""
    body: Any = refused.body
    error: dict[str, str] = body["error"]
    return error


async def test_both_vendors_clients_show_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:sk-red\nblue:sk-blue\n")
    async with stack(tmp_path, api_keys_file=file) as up:
        async with gpt(up, "sk-red") as client:
            await client.chat.completions.create(**CHAT)
        async with claude(up, "sk-blue") as other:
            await other.messages.create(**MESSAGES)
        async with claude(up, "sk-nobody") as nobody:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await nobody.messages.create(**MESSAGES)
        assert error_of(refused.value)["type"] == "authentication_error"
        assert [place.tenant for place in up.router.places] == ["red", "blue"]
        sent = [{name.lower() for name in headers} for _, _, headers in up.engines[0].requests]
        assert all(not {"x-api-key", "authorization", "anthropic-version", "user-agent"} & names for names in sent)
        assert (await ask(up, "/v1/models"))[0] == 401
        assert (await ask(up, "/v1/responses/resp_1"))[0] == 401
        assert (await ask(up, "/health"))[0] == 200


async def test_new_keys_hold_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:old\n")
    async with stack(tmp_path, api_keys_file=file) as up:
        assert await status_of(up, "old") == 200
        file.write_text("red:new-one\n")
        await asyncio.sleep(LOOK_AGAIN_S)
        assert await status_of(up, "old") == 401
        assert await status_of(up, "new-one") == 200


async def test_keys_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_GATEWAY_API_KEYS", "red:k1;blue:k2")
    async with stack(tmp_path) as up:
        assert [await status_of(up, key) for key in ("k1", "k2", "k3")] == [200, 200, 401]


async def test_requests_per_minute_are_limited_by_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:k1 requests_per_minute=2\nred:k2\n")
    async with stack(tmp_path, api_keys_file=file) as up:
        assert [await status_of(up, "k1") for _ in range(3)] == [200, 200, 429]
        assert await status_of(up, "k1", {"model": MODEL, "tokens": [1]}, "/detokenize") == 429
        assert await status_of(up, "k2") == 200
        async with gpt(up, "k1") as client:
            with pytest.raises(openai.RateLimitError) as limited:
                await client.responses.create(**RESPONSES)
        assert limited.value.code == "rate_limit_exceeded"
        assert 1 <= int(limited.value.response.headers["Retry-After"]) <= 30
        async with claude(up, "k1") as other:
            with pytest.raises(anthropic.RateLimitError) as also:
                await other.messages.create(**MESSAGES)
        assert error_of(also.value)["type"] == "rate_limit_error"
        assert len(up.router.places) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_per_minute_count_prompt_and_answer(tmp_path: Path, stream: bool) -> None:
    file = tmp_path / "keys"
    file.write_text("red:k1 tokens_per_minute=50\n")
    async with stack(tmp_path, api_keys_file=file) as up:
        up.engines[0].words = ("w ",) * 600
        assert await status_of(up, "k1", CHAT | {"stream": stream}) == 200
        await finished(up)
        async with gpt(up, "k1") as client:
            with pytest.raises(openai.RateLimitError) as limited:
                await client.chat.completions.create(**CHAT)
        owed = len(up.engines[0].tokenizer.chat(CHAT)) + 600 - 50 + 1
        # Less what was refilled since then: a stalled machine may have taken a minute.
        assert owed * 60 / 50 - 60 < int(limited.value.response.headers["Retry-After"]) <= owed * 60 / 50 + 1


async def test_answers_tell_what_is_left_of_their_keys_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:k1 requests_per_minute=3 tokens_per_minute=6000\nblue:k2 tokens_per_minute=6000\ngreen:k3\n")
    async with stack(tmp_path, api_keys_file=file) as up:
        prompt = len(up.engines[0].tokenizer.chat(CHAT))
        async with gpt(up, "k1") as client:
            headers = (await client.chat.completions.with_raw_response.create(**CHAT)).headers
            assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", "2")
            assert headers["x-ratelimit-reset-requests"] == "20s"
            assert headers["x-ratelimit-limit-tokens"] == "6000"
            # The prompt's tokens are charged when the answer begins; a few may have been refilled.
            assert 6_000 - prompt <= int(headers["x-ratelimit-remaining-tokens"]) <= 6_000
            async with client.chat.completions.with_streaming_response.create(**CHAT, stream=True) as streamed:
                assert streamed.headers["x-ratelimit-remaining-requests"] in "12"
            await client.responses.create(**RESPONSES)
            with pytest.raises(openai.RateLimitError) as limited:
                await client.chat.completions.create(**CHAT)
            assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"
            assert limited.value.response.headers["Retry-After"]
        async with claude(up, "k2") as other:
            fields = (await other.messages.with_raw_response.create(**MESSAGES)).headers
        assert fields["anthropic-ratelimit-tokens-limit"] == "6000"
        assert int(fields["anthropic-ratelimit-tokens-remaining"]) <= 6_000
        left = datetime.fromisoformat(fields["anthropic-ratelimit-tokens-reset"]) - datetime.now(UTC)
        assert -60 < left.total_seconds() < 60
        assert not [name for name in fields if name.startswith("anthropic-ratelimit-requests")]
        async with gpt(up, "k3") as unlimited:
            none = (await unlimited.chat.completions.with_raw_response.create(**CHAT)).headers
        assert not [name for name in none if "ratelimit" in name]


async def test_each_request_of_a_tenant_is_one_line_for_its_bill(tmp_path: Path) -> None:
    keys, bill = tmp_path / "keys", tmp_path / "usage.jsonl"
    keys.write_text("red:k1\nblue:k2 requests_per_minute=1\n")
    async with stack(tmp_path, api_keys_file=keys, usage_file=bill) as up:
        prompt, words = len(up.engines[0].tokenizer.chat(CHAT)), len(up.engines[0].words)
        headers = {"Authorization": "Bearer k1", "X-Request-ID": "mine"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for body in (CHAT, CHAT | {"stream": True}, CHAT | {"model": "nobody"}, {"model": MODEL}):
                async with http.post(up.url + Endpoint.CHAT.value, json=body) as answer:
                    await answer.read()
            for engine in up.engines:
                engine.mode = "500"
            async with http.post(up.url + Endpoint.CHAT.value, json=CHAT) as answer:
                await answer.read()
            for engine in up.engines:
                engine.mode, engine.hold = "ok", asyncio.Event()
            gone = await http.post(up.url + Endpoint.CHAT.value, json=CHAT | {"stream": True})
            await gone.content.readany()
            gone.close()
            await eventually(lambda: len(bill.read_text().splitlines()) == 6)
            for engine in up.engines:
                engine.hold = None
        assert [await status_of(up, "k2"), await status_of(up, "k2"), await status_of(up, "nobody")] == [200, 429, 401]
        await eventually(lambda: len(bill.read_text().splitlines()) == 8)
        page = generate_latest(up.gateway.telemetry.registry).decode()
    lines = [json.loads(line) for line in bill.read_text().splitlines()]
    brief = [
        (line["tenant"], line["status"], line["outcome"], line["prompt_tokens"], line["completion_tokens"])
        for line in lines
    ]
    assert brief[:5] == [
        ("red", 200, "ok", prompt, words),
        ("red", 200, "ok", prompt, words),
        ("red", 404, "rejected", 0, 0),
        ("red", 400, "rejected", 0, 0),
        ("red", 500, "failed", 0, 0),
    ]
    # A request that is cancelled midway has used the prompt's tokens and those that were sent.
    assert brief[5] == ("red", 499, "cancelled", prompt, 1)
    assert brief[6:] == [("blue", 200, "ok", prompt, words), ("blue", 429, "rejected", 0, 0)]
    assert [line["stream"] for line in lines[:2]] == [False, True]
    assert {line["request_id"] for line in lines[:6]} == {"mine"}
    assert {line["api"] for line in lines} == {Endpoint.CHAT.value}
    assert [line["model"] for line in lines[:3]] == [MODEL, MODEL, ""]
    assert all(line["duration_s"] >= 0 and 0 <= line["cached_tokens"] <= line["prompt_tokens"] for line in lines)
    assert "sk-" not in bill.read_text()
    assert f'tenant_prompt_tokens_total{{model="{MODEL}",tenant="red"}} {3.0 * prompt}' in page
    assert f'tenant_requests_total{{model="{MODEL}",tenant="blue"}} 1.0' in page


async def test_streams_in_flight_are_limited_and_come_back(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:k1 in_flight=2\n")
    async with stack(tmp_path, api_keys_file=file) as up:
        up.engines[0].hold = asyncio.Event()
        headers = {"Authorization": "Bearer k1"}
        async with aiohttp.ClientSession(headers=headers) as http:
            one, two = [await http.post(up.url + Endpoint.CHAT.value, json=CHAT | {"stream": True}) for _ in range(2)]
            assert await status_of(up, "k1") == 429
            one.close()
            await finished(up)
            up.engines[0].hold.set()
            assert await status_of(up, "k1") == 200
            assert b"[DONE]" in await two.read()
        (key,) = up.gateway.keys.digests
        await eventually(lambda: not up.gateway._rate_limiter.in_flight(key))


async def test_a_tenants_salt_enters_payload_and_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:k1 cache_salt=s4lt\nblue:k2\n")
    async with stack(tmp_path, api_keys_file=file, client_cache_salt=True) as up:
        for kind in (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES, Endpoint.COMPLETION):
            body = BODIES[kind] | {"cache_salt": "theirs", "session_id": "s"}
            assert await status_of(up, "k1", body, kind.value) == 200
            path, seen, headers = up.engines[0].requests[-1]
            assert (path, seen["cache_salt"]) == (kind.value, "s4lt")
            assert "session_id" not in seen
            assert headers["X-Session-ID"] == "red/s"
        ids = up.engines[0].tokenizer.chat(CHAT)
        assert list(up.router.places[0].keys) == list(prompt_keys(ids, MODEL, "", "s4lt"))
        assert await status_of(up, "k2", CHAT) == 200
        assert list(up.router.places[-1].keys) == list(prompt_keys(ids, MODEL))


async def test_a_response_is_its_tenants_own(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("red:k1\nblue:k2\n")
    async with stack(tmp_path, api_keys_file=file) as up, gpt(up, "k1") as red, gpt(up, "k2") as blue:
        made = await red.responses.create(**RESPONSES)
        assert (await red.responses.retrieve(made.id)).id == made.id
        for attempt in (blue.responses.retrieve(made.id), blue.responses.cancel(made.id)):
            with pytest.raises(openai.NotFoundError):
                await attempt
        with pytest.raises(openai.NotFoundError):
            await blue.responses.create(**RESPONSES, previous_response_id=made.id)


async def test_placements_are_shown_only_where_that_is_wanted(tmp_path: Path) -> None:
    async with stack(tmp_path, expose_placement=False) as up:
        async with gpt(up) as client:
            raw = await client.chat.completions.with_raw_response.create(**CHAT)
            assert not [name for name in raw.headers if name.lower().startswith("x-pointsman")]
            up.engines[0].mode = "400"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**CHAT)
        assert not [name for name in refused.value.response.headers if name.lower().startswith("x-pointsman")]
        status, answer = await ask(up, Endpoint.CHAT.value, CHAT, **{"X-Pointsman-Dry-Run": "1"})
        assert (status, answer["error"]["code"]) == (403, "dry_run_disabled")
        assert up.router.explained == []


async def test_dry_runs_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        dry = {"X-Pointsman-Dry-Run": "1"}
        answers = await asyncio.gather(
            *(ask(up, Endpoint.CHAT.value, CHAT, **dry) for _ in range(routes.DRY_RUNS_AT_ONCE * 3))
        )
        refused = [answer["error"]["code"] for status, answer in answers if status == 429]
        assert set(refused) == {"rate_limit_exceeded"}
        assert len(up.router.explained) == len(answers) - len(refused) >= routes.DRY_RUNS_AT_ONCE
        assert (await ask(up, Endpoint.CHAT.value, CHAT))[0] == 200


async def test_a_body_over_the_limit_is_refused_in_the_apis_form(tmp_path: Path) -> None:
    async with stack(tmp_path, max_body_bytes=10_000) as up, claude(up) as client:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(**MESSAGES | {"system": "x" * 20_000})
        assert refused.value.status_code == 413
        assert error_of(refused.value)["type"] == "request_too_large"


async def test_engines_get_another_name_for_each_tenants_session(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a:k1\na/b:k2\ndefault:k3\n")
    async with stack(tmp_path, api_keys_file=file) as up:
        names = {}
        for key, session_id in (("k1", "b/c"), ("k2", "c"), ("k3", "a/b/c"), ("k3", "c")):
            assert await status_of(up, key, CHAT | {"session_id": session_id}) == 200
            names[key, session_id] = up.engines[0].requests[-1][2]["X-Session-ID"]
        assert list(names.values()) == ["a/b/c", "a%2Fb/c", "default/a/b/c", "c"]
