"""Layer-wise push between real engines over Mooncake and TCP: answers stay the same, requests are answered despite faults, and
nothing is left behind. The engines have the connector package installed, and run it with faults that tests switch on."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman_cli import doctor_kv
from pointsman_cli.doctor_findings import EngineAccess, Finding
from tests.support.engines.chat_client import complete, fresh_words
from tests.support.engines.direct_offloads import OUTPUT, Offload, Refused, alone, post, session
from tests.support.engines.fault_switches import FAULTY, WITHIN_S, assert_nothing_left, faulty, reported, stepped
from tests.support.engines.fetching import assert_fetched, fetching
from tests.support.engines.offloading import assert_offloaded, assert_tie, in_step, offloading, stopped
from tests.support.engines.servers import KV_EXPIRES_S, SERVED_NAME, Engine, EngineSpec, running_engines
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

# How long engines keep KV that nobody fetches, and wait for a prompt that does not come, in tests that wait for that, s.
# In other tests it is a minute, so that no transfer expires on a busy machine.
EXPIRES_S = 4
LONGEST = 8_000


@pytest.fixture(scope="module")
def trio(model_folder: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """An engine that computes prompts in chunks of 256 tokens, one that computes them in one piece, and a small one. The small
    one starts prompts for which it has too few blocks, and computes KV itself that does not arrive."""
    folder = tmp_path_factory.mktemp("trio")

    def spec(name: str, chunk: int, capacity: int, *more: str, **transfer: str) -> EngineSpec:
        return EngineSpec(
            name,
            kv_capacity_tokens=capacity,
            max_model_len=LONGEST + 448,
            extra_args=("--max-num-batched-tokens", str(chunk), "--max-num-seqs", "32", *more),
            kv_transfer={**FAULTY, **transfer},
            env={
                "PYTHONPATH": str(site),
                "POINTSMAN_FAULTS": str(folder / name),
                "POINTSMAN_AGENT_LOADS": f"ipc://{folder}/loads",
                # How long the transport waits for a dead peer, s.
                "MC_TRANSFER_TIMEOUT": "5",
                # For /reset_prefix_cache.
                "VLLM_SERVER_DEV_MODE": "1",
            },
        )

    specs = [
        spec("chunks", 256, 48_000),
        spec("whole", LONGEST + 448, 48_000),
        spec("spare", 256, 9_728, "--no-scheduler-reserve-full-isl", kv_load_failure_policy="recompute"),
    ]
    with running_engines(specs, model_folder, folder) as engines:
        yield engines


# ---- answers ----


def run(ask: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    async def asked() -> Any:
        async with session() as http:
            return await ask(http)

    return asyncio.run(asked())


async def all_alone(http: aiohttp.ClientSession, engines: list[Engine], prompts: list[str]) -> list[str]:
    """The answers of engines that compute everything themselves, with three requests in flight at each."""
    gates = [asyncio.Semaphore(3) for _ in engines]

    async def one(number: int, prompt: str) -> str:
        async with gates[number % len(engines)]:
            return await alone(http, engines[number % len(engines)], prompt)

    return await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def assert_right(engines: list[Engine], answers: list[tuple[str, str]]) -> None:
    """Check that each (prompt, answer) is what an engine answers alone, except for ties."""
    prompts = list(dict.fromkeys(prompt for prompt, _ in answers))
    expected = dict(zip(prompts, run(lambda http: all_alone(http, engines, prompts)), strict=True))
    for prompt, seen in answers:
        if seen != expected[prompt]:
            assert_tie(engines[0], prompt, expected[prompt], seen)


def nothing_left(*engines: Engine) -> None:
    assert_nothing_left(*engines, within_s=30)


def beginning(text: str, words: int) -> str:
    return "".join(f" {word}" for word in text.split()[:words])


def mixed_length(rng: random.Random, number: int) -> int:
    """From 1 token to 8k, mostly short; now and then a long one, or one at the edge of a block or chunk."""
    edges = (LONGEST, 1, 2, 4_096, 31, 32, 33, 5_500, 255, 256, 257, 6_000, 511, 512)
    often, at = divmod(number, 15)
    return round(1_500 ** rng.random()) if at else edges[often]


def test_200_mixed_requests_are_answered_as_one_engine_would(trio: list[Engine]) -> None:
    """Six in flight, in both directions, the receiver asked first, at once or last; prompts that begin as others did."""
    rng = random.Random(11)
    chunks, whole, spare = trio
    hits = [engine.metric("vllm:prefix_cache_hits_total") for engine in (chunks, whole)]
    answers: list[tuple[str, str]] = []

    async def ask(http: aiohttp.ClientSession) -> None:
        gate = asyncio.Semaphore(6)

        async def one(number: int) -> None:
            async with gate:
                prompt = fresh_words(mixed_length(rng, number))
                if answers and rng.random() < 0.3:
                    earlier, _ = rng.choice(answers)
                    kept = beginning(earlier, rng.randint(1, 1_000))
                    prompt = kept if rng.random() < 0.2 else kept + beginning(prompt, 1_000)
                p, d = rng.sample((chunks, whole), 2)
                offload = Offload(http, p, d, prompt, lead_s=rng.choice((0.02, 0.02, 0.02, 0.0, -1.0)))
                answers.append((prompt, await offload.answer()))

        await asyncio.gather(*(one(number) for number in range(210)))

    run(ask)
    assert_right([whole, spare], answers)
    for engine, before in zip((chunks, whole), hits, strict=True):
        assert engine.metric("vllm:prefix_cache_hits_total") > before
        assert reported(engine)["pushes"] > 0
        assert reported(engine)["fallbacks"] == 0
    nothing_left(*trio)


def offloaded(p: Engine, d: Engine, words: int) -> tuple[str, str]:
    """A prompt, and its answer by `d` with `p`'s KV. P learns of D before its prefill begins."""
    prompt = fresh_words(words)

    async def ask(http: aiohttp.ClientSession) -> str:
        offload = Offload(http, p, d, prompt)
        text = asyncio.create_task(offload.decode())
        await asyncio.to_thread(until, lambda: reported(p)["state"]["receivers"], within_s=WITHIN_S, what="a receiver")
        await offload.prefill()
        return await text

    return prompt, run(ask)


def refused(p: Engine, d: Engine, words: int) -> tuple[str, str]:
    """As `offloaded`, where `d` loads nothing from `p`."""
    prompt = fresh_words(words)
    return prompt, run(lambda http: Offload(http, p, d, prompt).answer())


async def in_the_middle(
    http: aiohttp.ClientSession, p: Engine, d: Engine
) -> tuple[str, asyncio.Task[Any], asyncio.Task[str]]:
    """A prompt, and P's and D's request of a transfer that is partly written. The caller must make P's writes slow."""
    prompt = fresh_words(3_000)
    offload = Offload(http, p, d, prompt)
    before = reported(p)["pushes"]
    text = asyncio.create_task(offload.decode())
    await asyncio.sleep(0.05)
    prefill = asyncio.create_task(offload.prefill())
    await asyncio.to_thread(until, lambda: reported(p)["pushes"] > before, within_s=WITHIN_S, what="a first push")
    return prompt, prefill, text


def test_a_preempted_prefill_is_sent_anew(trio: list[Engine]) -> None:
    """The prefill starts again twice, while a write of what it had computed before is still under way."""
    p, d, _ = trio
    before = p.metric("vllm:num_preemptions_total")

    async def ask(http: aiohttp.ClientSession) -> tuple[str, str]:
        prompt, prefill, text = await in_the_middle(http, p, d)
        for _ in range(2):
            await asyncio.to_thread(p.ask, "/reset_prefix_cache?reset_running_requests=true", {})
            # After this step the prompt has started again.
            await asyncio.to_thread(stepped, p)
        await prefill
        return prompt, await text

    # The prompt takes some dozen steps, and layer_s delays each: on no machine does it end before it is preempted.
    with faulty(p, slow_s=0.2, layer_s=0.1):
        answer = run(ask)
    assert p.metric("vllm:num_preemptions_total") == before + 2
    assert_right([d], [answer])
    nothing_left(p, d)


def test_a_prefill_without_blocks_begins_anew(trio: list[Engine]) -> None:
    """Two running answers leave too few blocks for it; it is computed when they have ended."""
    d, _, p = trio
    before = p.metric("vllm:num_preemptions_total")

    async def ask(http: aiohttp.ClientSession) -> tuple[str, str]:
        others = [
            asyncio.create_task(post(http, p, {"prompt": fresh_words(3_300), "max_tokens": 150})) for _ in range(2)
        ]
        await asyncio.to_thread(until, lambda: p.running() == 2, within_s=WITHIN_S, what="two answers under way")
        prompt = fresh_words(3_200)
        answer = await Offload(http, p, d, prompt).answer()
        await asyncio.gather(*others)
        return prompt, answer

    answer = run(ask)
    assert p.metric("vllm:num_preemptions_total") > before
    assert_right([d], [answer])
    nothing_left(p, d)


# ---- faults ----


def test_a_layer_that_is_withheld_is_noticed(trio: list[Engine]) -> None:
    """Without this test the comparisons above would prove nothing."""
    chunks, whole, _ = trio
    with faulty(chunks, withhold=[1]), faulty(whole, unchecked=1):
        answers = [offloaded(chunks, whole, 600) for _ in range(3)]
    for answer in answers:
        with pytest.raises(AssertionError, match="instead of"):
            assert_right([whole], [answer])


def test_the_doctor_compares_answers_from_transferred_kv(trio: list[Engine]) -> None:
    chunks, whole, _ = trio

    def levels() -> list[tuple[str, str]]:
        pool = [
            agent_pb2.Instance(
                instance_id=engine.spec.name,
                model=SERVED_NAME,
                url=engine.url,
                block_size=32,
                kv_transfer=agent_pb2.KvTransfer(
                    protocol=agent_pb2.KV_PROTOCOL_MOONCAKE,
                    bootstrap_url=f"http://127.0.0.1:{engine.bootstrap_port}",
                    layerwise=True,
                ),
            )
            for engine in (chunks, whole)
        ]
        return [(finding.check, finding.level) for finding in doctor_kv.answers(pool, EngineAccess())]

    assert levels() == [("chunks -> whole KV", Finding.OK), ("whole -> chunks KV", Finding.OK)]
    # One region alone can leave an answer as it is.
    with faulty(chunks, withhold=[0, 1, 2, 3]), faulty(whole, unchecked=1):
        assert levels() == [("chunks -> whole KV", Finding.FAIL), ("whole -> chunks KV", Finding.OK)]
    nothing_left(chunks, whole)


def test_wrong_kv_is_not_used_and_its_sender_is_refused(trio: list[Engine]) -> None:
    chunks, _, spare = trio
    url = f"http://127.0.0.1:{chunks.bootstrap_port}"
    with urllib.request.urlopen(f"{url}/query") as answer:
        engine_id = json.load(answer)["0"]["engine_id"]
    sender = {"sender": url, "engine_id": engine_id, "engine": "0"}
    with faulty(chunks, withhold=[1]):
        answers = [offloaded(chunks, spare, 600), refused(chunks, spare, 600), refused(chunks, spare, 600)]
    assert_right([spare], answers)
    until(
        lambda: spare.metric("pointsman_kv_wrong_requests_total", **sender) == 1,
        within_s=WITHIN_S,
        what="one request with wrong KV; after it nothing is loaded",
    )
    before = reported(chunks)["pushes"]
    assert_right([spare], [refused(chunks, spare, 600)])
    assert reported(chunks)["pushes"] == before
    with faulty(spare, forgiving=1):
        pass
    assert_right([spare], [offloaded(chunks, spare, 600)])
    assert spare.metric("pointsman_kv_wrong_requests_total", **sender) == 1
    assert reported(chunks)["pushes"] > before
    nothing_left(*trio)


@pytest.mark.parametrize(("fault", "value"), [("fail", 1), ("silent", 1), ("slow_s", 0.3)])
def test_failed_and_late_layers_go_after_the_prefill(trio: list[Engine], fault: str, value: float) -> None:
    for p, d in ((trio[0], trio[1]), (trio[1], trio[0])):
        before = reported(p)["fallbacks"]
        with faulty(p, **{fault: value}):
            answers = [offloaded(p, d, words) for words in (1, 600, 3_000)]
        assert_right([d], answers)
        # A transfer that is merely slow is waited for.
        assert reported(p)["fallbacks"] - before == (0 if fault == "slow_s" else 3)
    nothing_left(*trio)


def test_500_aborts_leave_nothing_behind(trio: list[Engine]) -> None:
    rng = random.Random(5)
    chunks, whole, _ = trio

    async def ask(http: aiohttp.ClientSession) -> None:
        gate = asyncio.Semaphore(16)

        async def one() -> None:
            async with gate:
                p, d = rng.sample((chunks, whole), 2)
                offload = Offload(http, p, d, fresh_words(round(1_500 ** rng.random())), output=rng.choice((1, 24)))
                both = [asyncio.create_task(half) for half in (offload.decode(), offload.prefill())]
                # One request or both are cancelled; the engines end the other one.
                for half in rng.choice((both, both[:1], both[1:])):
                    await asyncio.sleep(0.3 * rng.random() ** 2)
                    half.cancel()
                await asyncio.gather(*both, return_exceptions=True)

        await asyncio.gather(*(one() for _ in range(500)))

    with faulty(chunks, expires_s=EXPIRES_S), faulty(whole, expires_s=EXPIRES_S):
        run(ask)
        nothing_left(chunks, whole)
    assert_right([whole], [offloaded(chunks, whole, 500), offloaded(whole, chunks, 500)])


# ---- Pointsman before them ----


@pytest.fixture(scope="module")
def running_plane(trio: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that offloads between the first two. Its agent scrapes /metrics at its start, and hardly after."""
    flags = {"--step-loads-listen": trio[0].spec.env["POINTSMAN_AGENT_LOADS"], "--scrape-interval-s": 50}
    folder = tmp_path_factory.mktemp("layerwise-plane")
    with offloading(trio[:2], folder, agent_flags=flags).running() as plane:
        yield plane


def test_the_gateway_asks_the_receiver_first(running_plane: ControlPlane, trio: list[Engine]) -> None:
    before = [reported(engine) for engine in trio[:2]]
    with in_step(running_plane) as plane, plane.client() as client:
        for number in (500, 3_000):
            for stream in (True, False):
                assert_offloaded(plane, client, trio[:2], number, stream=stream)
    after = [reported(engine) for engine in trio[:2]]
    pushes, fallbacks = (
        sum(now[name] for now in after) - sum(was[name] for was in before) for name in ("pushes", "fallbacks")
    )
    # A long prompt takes more than one push, because it is sent while it is computed.
    assert pushes >= 2 + 2 * 2
    assert fallbacks == 0


def load_of(plane: ControlPlane, engine: Engine) -> list[float]:
    """The load of an engine as the router knows it, and the prompts that it has computed since it was started."""
    load = plane.instance(engine).load
    return [load.running, load.prefill_tokens_left, load.steps.prefills]


def own_load(engine: Engine) -> list[float]:
    """The same load as the engine reports it."""
    return [engine.running(), 0, engine.metric("vllm:request_success_total")]


def test_the_agent_knows_the_load_after_each_step(running_plane: ControlPlane, trio: list[Engine]) -> None:
    """Prompts are fresh, and all requests before were answered."""
    with in_step(running_plane) as plane, plane.client() as client:
        known = {engine.spec.name: [load_of(plane, engine), own_load(engine)] for engine in trio[:2]}
        for number in range(3):
            complete(client, fresh_words(50), max_tokens=5 + number)
            for engine in trio[:2]:
                before, own_before = known[engine.spec.name]
                deadline = time.monotonic() + 10.0
                while changes(before, load_of(plane, engine)) != changes(own_before, own_load(engine)):
                    assert time.monotonic() < deadline, (engine.spec.name, load_of(plane, engine), own_load(engine))
                    time.sleep(0.05)


def changes(before: list[float], after: list[float]) -> list[float]:
    return [now - was for was, now in zip(before, after, strict=True)]


async def test_a_prefix_is_fetched_from_its_owner(trio: list[Engine]) -> None:
    """What the owner has evicted it computes, in several chunks."""
    p, d, _ = trio
    before = reported(p)["fallbacks"]
    async with fetching(p, d, layerwise=True) as fetch:
        await assert_fetched(fetch)
        await assert_fetched(fetch, hits=0)
    assert reported(p)["fallbacks"] == before
    nothing_left(p, d)


# ---- one side is paused, or dies ----


def test_d_stands_still_in_the_middle(trio: list[Engine]) -> None:
    """P answers meanwhile; D has its KV when it resumes."""
    p, d, _ = trio

    async def ask(http: aiohttp.ClientSession) -> tuple[str, str]:
        prompt, prefill, text = await in_the_middle(http, p, d)
        with stopped(d):
            await asyncio.wait_for(prefill, WITHIN_S)
        return prompt, await asyncio.wait_for(text, WITHIN_S)

    with faulty(p, slow_s=0.5):
        answer = run(ask)
    assert_right([d], [answer])
    nothing_left(p, d)


def test_p_stands_still_in_the_middle(trio: list[Engine]) -> None:
    """D continues with all other requests, and its client may give up."""
    d, p, _ = trio

    async def ask(http: aiohttp.ClientSession) -> None:
        _, prefill, text = await in_the_middle(http, p, d)
        with stopped(p):
            await asyncio.wait_for(alone(http, d, fresh_words(100)), WITHIN_S)
            text.cancel()
            await asyncio.to_thread(until, lambda: not d.running(), within_s=WITHIN_S, what="that D gave it up")
        await asyncio.wait_for(prefill, WITHIN_S)

    with faulty(p, slow_s=0.5):
        run(ask)
    nothing_left(p, d)


def test_p_stands_still_for_too_long(trio: list[Engine]) -> None:
    """D computes the prompt itself in the end. When P resumes, it does not overwrite what D has put in those blocks since."""
    p, other, d = trio

    async def plain(http: aiohttp.ClientSession, prompt: str) -> tuple[str, str]:
        return prompt, (await post(http, d, {"prompt": prompt, "max_tokens": OUTPUT}))["choices"][0]["text"]

    async def ask(http: aiohttp.ClientSession) -> list[tuple[str, str]]:
        prompt, prefill, text = await in_the_middle(http, p, d)
        with stopped(p):
            answers = [(prompt, await asyncio.wait_for(text, WITHIN_S))]
            since = [fresh_words(3_000) for _ in range(3)]
            answers += [await plain(http, prompt) for prompt in since]
        await asyncio.wait_for(prefill, WITHIN_S)
        await asyncio.to_thread(nothing_left, p)
        return answers + [await plain(http, prompt) for prompt in reversed(since)]

    before = reported(p)["pushes"]
    with faulty(p, slow_s=0.5, expires_s=EXPIRES_S), faulty(d, expires_s=EXPIRES_S):
        answers = run(ask)
    assert reported(p)["pushes"] - before <= 2
    assert_right([other], answers)
    nothing_left(p, d)


def test_d_dies_in_the_middle(trio: list[Engine]) -> None:
    p, _, d = trio

    async def ask(http: aiohttp.ClientSession) -> None:
        _, prefill, text = await in_the_middle(http, p, d)
        d.process.kill()
        await asyncio.wait_for(prefill, WITHIN_S)
        with pytest.raises(aiohttp.ClientError):
            await text

    with faulty(p, slow_s=0.5):
        run(ask)
    nothing_left(p)


def test_p_dies_in_the_middle(trio: list[Engine]) -> None:
    """D reports it long before its own timeout."""
    d, p, _ = trio

    async def ask(http: aiohttp.ClientSession) -> None:
        _, prefill, text = await in_the_middle(http, p, d)
        p.process.kill()
        with pytest.raises(Refused):
            await asyncio.wait_for(text, KV_EXPIRES_S / 2)
        # P's request may have ended before the kill.
        await asyncio.gather(prefill, return_exceptions=True)

    with faulty(p, slow_s=0.5):
        run(ask)
    nothing_left(d)
