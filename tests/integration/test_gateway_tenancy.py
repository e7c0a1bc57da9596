"""Keys, their limits and their salts, through the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from pointsman.common.core.block_keys import prompt_keys
from pointsman.gateway.core.api import Endpoint
from pointsman.gateway.io.api_keys import LOOK_AGAIN_S
from tests.support.fakes.gateway_peers import MODEL, Stack, stack
from tests.support.gateway_requests import BODIES, MESSAGES, RESPONSES, ask, claude, finished, gpt
from tests.support.waiting import eventually

CHAT = BODIES[Endpoint.CHAT]


async def status_of(up: Stack, key: str, body: dict[str, Any] = CHAT, path: str = Endpoint.CHAT.value) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(up.url + path, json=body) as answer:
        await answer.read()
        return answer.status


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
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
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
        assert also.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
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
        # Less what the time since then has paid: a stalled machine may have taken a minute.
        assert owed * 60 / 50 - 60 < int(limited.value.response.headers["Retry-After"]) <= owed * 60 / 50 + 1


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
        (key,) = up.gateway._keys.digests
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


async def test_placements_are_told_only_where_that_is_wanted(tmp_path: Path) -> None:
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


async def test_a_body_over_the_limit_is_refused_in_the_apis_form(tmp_path: Path) -> None:
    async with stack(tmp_path, max_body_bytes=10_000) as up, claude(up) as client:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(**MESSAGES | {"system": "x" * 20_000})
        assert refused.value.status_code == 413
        assert refused.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
