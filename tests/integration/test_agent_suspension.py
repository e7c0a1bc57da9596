"""What an agent reports of engines that are asleep or paused, and of adapters that come and go."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import aiohttp
import pytest

from pointsman_agent.core.kv_events import AllBlocksCleared
from pointsman_agent.io import engine_monitor
from pointsman_common.core.block_keys import prompt_keys
from pointsman_lab.emulator.emulated_engine import EmulateSettings
from pointsman_lab.emulator.emulated_engine import start as emulate
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, running
from tests.support.kv_events import store, tokens_of
from tests.support.waiting import eventually


def suspended(router: FakeRouter) -> str | None:
    """The reason in the newest load; None without a load."""
    return router.streams[0].loads[-1].suspended if router.streams and router.streams[0].loads else None


def keys(router: FakeRouter, engine: FakeEngine) -> set[int] | None:
    return router.keys(f"127.0.0.1:{engine.port}")


async def test_a_sleeping_engine_is_suspended_and_its_keys_are_dropped(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path
) -> None:
    async with running(engine.url, [router.address], tmp_path):
        await engine.publish(store((1, 2)))
        await eventually(lambda: keys(router, engine) == set(prompt_keys(tokens_of((1, 2)), "tiny")), "the keys")
        assert suspended(router) == ""
        engine.awake, engine.operations = False, {"sleep": 1}
        await eventually(lambda: "level 1" in (suspended(router) or ""), "that it is asleep")
        assert router.streams[0].loads[-1].healthy
        await eventually(lambda: keys(router, engine) == set(), "no keys before its event")
        engine.awake, engine.operations = True, {"sleep": 1, "wake": 1}
        await eventually(lambda: suspended(router) == "", "that it is awake")
        await engine.publish(AllBlocksCleared(), store((3,)))
        await eventually(lambda: keys(router, engine) == set(prompt_keys(tokens_of((3,)), "tiny")), "the new keys")


async def test_a_paused_engine_is_suspended_also_if_it_answers_late(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_monitor, "PAUSE_ANSWER_S", 0.01)
    engine.paused = False
    async with running(engine.url, [router.address], tmp_path):
        await engine.publish(store((1,)))
        await eventually(lambda: keys(router, engine) == set(prompt_keys(tokens_of((1,)), "tiny")), "the keys")
        engine.pause_answers.clear()
        engine.paused = True
        seen = len(router.streams[0].loads)
        await eventually(lambda: len(router.streams[0].loads) > seen + 2, "loads without the answer")
        assert suspended(router) == ""
        engine.pause_answers.set()
        await eventually(lambda: suspended(router) == "paused", "that it is paused")
        await eventually(lambda: keys(router, engine) == set(), "no keys")
        engine.paused = False
        await eventually(lambda: suspended(router) == "", "that it is resumed")


@pytest.mark.parametrize("sleeps", [True, False], ids=["sleep", "pause"])
async def test_keys_from_after_a_reset_outlast_an_answer_from_before_it(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    """The engine says that it is paused when it computes again. Its events have told of the reset."""
    monkeypatch.setattr(engine_monitor, "PAUSE_ANSWER_S", 0.01)
    engine.paused = False

    async def loads(count: int) -> None:
        seen = len(router.streams[0].loads)
        await eventually(lambda: len(router.streams[0].loads) >= seen + count, "loads")

    async with running(engine.url, [router.address], tmp_path):
        await engine.publish(store((1,)))
        await eventually(lambda: keys(router, engine) == set(prompt_keys(tokens_of((1,)), "tiny")), "the keys")
        engine.pause_answers.clear()
        engine.paused = True
        if sleeps:
            engine.awake, engine.operations = False, {"sleep": 1}
            await eventually(lambda: "level 1" in (suspended(router) or ""), "that it is asleep")
        await loads(2)
        engine.paused = False
        if sleeps:
            engine.awake, engine.operations = True, {"sleep": 1, "wake": 1}
            await eventually(lambda: suspended(router) == "", "that it computes")
        await engine.publish(AllBlocksCleared(), store((3,)))
        after = set(prompt_keys(tokens_of((3,)), "tiny"))
        await eventually(lambda: keys(router, engine) == after, "the new keys")
        engine.pause_answers.set()
        await loads(5)
        await eventually(lambda: suspended(router) == "", "that it computes")
        await loads(3)
        assert keys(router, engine) == after


async def test_an_unloaded_adapter_is_noticed_soon(
    engine: FakeEngine, router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_monitor, "DESCRIBE_ADAPTERS_EVERY_S", 0.05)
    engine.adapters = ["sql"]
    async with running(engine.url, [router.address], tmp_path):
        await eventually(lambda: bool(router.streams), "a stream")
        assert list(router.streams[0].hello.instance.lora_names) == ["sql"]
        engine.adapters = []
        await eventually(lambda: list(router.streams[-1].hello.instance.lora_names) == [], "that it is gone")


async def test_an_emulated_engine_sleeps_pauses_and_wakes(router: FakeRouter, tmp_path: Path) -> None:
    engine = await emulate(EmulateSettings(port=0, speedup=20.0))
    name = engine.url.removeprefix("http://")
    try:
        async with (
            running(engine.url, [router.address], tmp_path),
            aiohttp.ClientSession(engine.url) as http,
        ):

            async def complete() -> str:
                body = {"model": "pointsman-emulated", "prompt": "one two three four five six " * 20, "max_tokens": 4}
                async with http.post("/v1/completions", json=body) as answer:
                    return str((await answer.json())["choices"][0]["finish_reason"])

            async def tell(path: str) -> None:
                async with http.post(path) as answer:
                    assert answer.status == 200

            def is_suspended(why: str) -> bool:
                return why in (suspended(router) or "")

            for path, reason, back in (
                ("/sleep?level=1", "level 1", "/wake_up"),
                ("/sleep?level=2", "level 2", "/wake_up"),
                ("/pause", "paused", "/resume"),
            ):
                await complete()
                await eventually(lambda: bool(router.keys(name)), "its keys")
                await tell(path)
                await eventually(partial(is_suspended, reason), f"that it is {reason}")
                await eventually(lambda: router.keys(name) == set(), "no keys")
                await tell(back)
                await eventually(lambda: suspended(router) == "", "that it computes")
            await tell("/sleep?level=0")
            await eventually(lambda: "asleep" in (suspended(router) or ""), "that it sleeps")
            await tell("/wake_up")
            await eventually(lambda: suspended(router) == "", "that it computes")
            assert await complete() == "length"
    finally:
        await engine.stop()
