"""Measuring an engine from outside: what can be learned for certain, and when nothing is measured. Times are not checked here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pointsman_lab.emulator.emulated_engine import EmulatedEngine, EmulateSettings, start
from pointsman_lab.engine.cost_fit import DecodeTime, fit
from pointsman_lab.engine.cost_profile import Profile, ProfileFile, read_profile
from pointsman_lab.live.engine_client import EngineBusyError, EngineClient, EngineError
from pointsman_lab.live.profile_command import ProfileSettings, measure, median_measurement, profile_of, run
from pointsman_lab.live.replay_command import ReplaySettings
from pointsman_lab.live.request_overhead import measure_overhead
from pointsman_lab.workload.tokenizer import ChatTokenizer

FAST = Profile(step_s=0.002, prefill_token_s=1e-5, prefill_pair_s=1e-9, decode_sequence_s=1e-5, decode_kv_token_s=1e-9)
# Enough time for a machine that stalls, so that the same measurements are always made.
SHORT: dict[str, Any] = {"seconds": 600.0, "longest": 700, "repeats": 1, "pause_s": 0.0}


@pytest.fixture
async def engine() -> AsyncIterator[EmulatedEngine]:
    """An emulated engine whose steps take 256 tokens."""
    settings = EmulateSettings(port=0, block_size=32, kv_blocks=500, max_model_len=4_096, max_num_batched_tokens=256)
    emulated = await start(settings, FAST)
    yield emulated
    await emulated.stop()


async def test_an_engine_is_measured(engine: EmulatedEngine, tmp_path: Path) -> None:
    measured = await measure(ProfileSettings(url=engine.url, **SHORT))
    known = {"block_size": 32, "kv_blocks": 500, "max_model_len": 4_096, "max_num_batched_tokens": 256}
    assert measured.engine == known
    # Prefills of new prompts, then those with a prefix, whose full blocks were cached.
    sizes = [(prefill.new, prefill.cached, prefill.steps) for prefill in measured.prefills]
    assert sizes == [
        (64, 0, 1),
        (128, 0, 1),
        (256, 0, 1),
        (512, 0, 2),
        (700, 0, 3),
        (92, 608, 1),
        (94, 320, 1),
        (158, 320, 1),
        (205, 320, 1),
        (365, 160, 2),
    ]
    assert len(measured.decodes) == 14
    assert not engine.model.has_work
    found = fit([*measured.prefills, *measured.decodes])
    file = profile_of(engine.url, measured, found)
    path = tmp_path / "p.json"
    path.write_bytes(file.encode())
    assert read_profile(path) == file
    assert found.profile.step_s > 0


async def test_rounds_are_taken_while_there_is_time(engine: EmulatedEngine) -> None:
    measured = await measure(ProfileSettings(url=engine.url, **SHORT | {"repeats": 2}), chunk=256)
    # A repeated measurement counts once.
    assert (len(measured.prefills), len(measured.decodes)) == (10, 14)
    assert measured.remarks == []
    hurried = await measure(ProfileSettings(url=engine.url, **SHORT | {"repeats": 9, "seconds": 0.001}), chunk=99)
    assert "there was time to take each measurement 1 times" in hurried.remarks
    # A given chunk size is not searched for.
    assert hurried.engine["max_num_batched_tokens"] == 99


def test_the_usual_one_counts() -> None:
    seen = [DecodeTime(1, 64.0, seconds) for seconds in (3.0, 1.0, 9.0, 1.5, 2.0)]
    assert median_measurement(seen).seconds == 2.0


async def test_a_busy_engine_is_left_alone(engine: EmulatedEngine) -> None:
    async with aiohttp.ClientSession() as http:
        body = {"prompt": "x", "max_tokens": 4_000, "ignore_eos": True, "stream": True}
        async with http.post(f"{engine.url}/v1/completions", json=body) as stream:
            await stream.content.readany()
            with pytest.raises(EngineBusyError, match="1 requests of others"):
                await measure(ProfileSettings(url=engine.url, **SHORT))
            assert len(engine.model.cache.cached_hashes()) < 1_000


async def test_others_requests_end_the_measurement(engine: EmulatedEngine) -> None:
    async def disturb() -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.post(f"{engine.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}) as answer:
                    await answer.read()

    disturbing = asyncio.create_task(disturb())
    try:
        with pytest.raises(EngineBusyError):
            await measure(ProfileSettings(url=engine.url, **SHORT))
    finally:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)


async def test_without_kv_events_the_chunk_is_taken_from_the_flag(
    engine: EmulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman_lab.live.engine_client.EngineClient._event_endpoint", _no_events)
    measured = await measure(ProfileSettings(url=engine.url, **SHORT, max_num_batched_tokens=100))
    assert measured.engine["max_num_batched_tokens"] == 100
    assert [prefill.steps for prefill in measured.prefills[:3]] == [1, 2, 3]


async def _no_events(self: object) -> str:
    return ""


async def test_what_requests_pay_beside_the_engines_time(
    engine: EmulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, pace = ChatTokenizer(), ReplaySettings(url=engine.url)
    front = await measure_overhead(pace, [engine.url], tokenizer, (64, 200), 3, 0.0)
    assert front.request_s + 200 * front.prompt_token_s > 0
    # Decode steps of one sequence, which follow the prompt.
    assert len(front.decodes) == 6
    assert {decode.batch for decode in front.decodes} == {1}
    assert (
        64 < min(decode.kv_tokens for decode in front.decodes) < 200 < max(decode.kv_tokens for decode in front.decodes)
    )
    assert all(decode.seconds > 0 for decode in front.decodes)
    counters = engine.model.counters
    # The prompts are chats, so they include the template's tokens. None finds blocks of another one cached.
    assert counters.prompt_tokens > 3 * (64 + 200)
    assert counters.prefix_cache_hits == 0
    with pytest.raises(EngineError, match="does not answer a chat: 400"):
        await measure_overhead(pace, [engine.url], tokenizer, (5_000,), 1, 0.0)
    other = await start(EmulateSettings(port=0), FAST)
    try:
        monkeypatch.setattr("pointsman_lab.live.request_overhead.METRICS_WITHIN_S", 0.1)
        with pytest.raises(EngineError, match="must name every engine"):
            await measure_overhead(pace, [other.url], tokenizer, (64,), 1, 0.0)
    finally:
        await other.stop()


async def test_an_answer_that_breaks_off_is_no_measurement() -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text='data: {"choices": []}\n\ndata: {"error": {"message": "out of memory"}}\n\n')

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        with pytest.raises(EngineError, match=r"breaks off: .* \{\"message\": \"out of memory"):
            await EngineClient(str(server.make_url("/")), http).complete([1, 2], 2, "salt")


async def test_what_is_no_vllm_is_refused(engine: EmulatedEngine) -> None:
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1/models"):
        await measure(ProfileSettings(url="http://127.0.0.1:9", **SHORT))
    with pytest.raises(EngineError, match="too short"):
        await measure(ProfileSettings(url=engine.url, longest=100))


def test_the_command_says_so_and_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "p.json"
    with pytest.raises(Exception, match="2"):
        run(ProfileSettings(url="http://127.0.0.1:9", output=output))
    assert "pointsman profile: http://127.0.0.1:9" in capsys.readouterr().err
    assert not output.exists()


async def test_an_emulated_engine_is_what_its_profile_says(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    engine_facts = {"block_size": 64, "kv_blocks": 99, "max_model_len": 2_048, "max_num_batched_tokens": 77}
    path.write_bytes(ProfileFile(costs=FAST, engine=engine_facts).encode())
    emulated = await start(EmulateSettings(port=0, profile=path, max_num_batched_tokens=88))
    try:
        config = emulated.model.config
        assert emulated.model.profile == FAST
        assert (config.block_size, config.kv_blocks, config.max_model_len) == (64, 99, 2_048)
        # Given values override the measured ones.
        assert config.max_num_batched_tokens == 88
    finally:
        await emulated.stop()
