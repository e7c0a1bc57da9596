"""The ways in which the engines of bench.ill_fleet can be ill, for real or by a tampering proxy."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.ill_fleet import CHAT, ENGINES, Engine, IllFleet, stopped
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR
from tests.support.http_request import ask
from tests.support.tampering_proxy import Fault

Illness = Callable[[IllFleet], AbstractAsyncContextManager[None]]
ILL_S = 8.0
# For what shows only when a first token is long overdue.
SILENT_S = 16.0
# Longer than `lost_instance_s` of the routers.
WITHOUT_AGENT_S = 16.0


@dataclass(frozen=True)
class Way:
    """A way of being ill. `ill_s`: how long, at least."""

    name: str
    illness: Illness
    ill_s: float = ILL_S


@asynccontextmanager
async def _tampering(fault: Fault, *paths: str, fleet: IllFleet) -> AsyncIterator[None]:
    fleet.set(fault, *paths)
    try:
        yield
    finally:
        fleet.heal()


def _fault(name: str, fault: Fault, *paths: str, ill_s: float = ILL_S) -> Way:
    return Way(name, lambda fleet: _tampering(fault, *paths, fleet=fleet), ill_s)


def _gauge(name: str, pattern: str, by: str) -> Way:
    def rewrite(page: bytes) -> bytes:
        return re.sub(pattern.encode(), by.encode(), page, flags=re.MULTILINE)

    return _fault(name, Fault(rewrite=rewrite), "/metrics")


def _status(status: int) -> Way:
    error = {"message": "by the bench", "type": "Error", "code": status}
    return _fault(
        f"answers {status} to every chat", Fault(status=status, body=json.dumps({"error": error}).encode()), CHAT
    )


@asynccontextmanager
async def _standing_still(fleet: IllFleet, *, agent: bool = False) -> AsyncIterator[None]:
    processes = [engine.process for engine in fleet.ill]
    with stopped([*processes, *([fleet.parts["agent"]] if agent else [])]):
        yield


@asynccontextmanager
async def _beside(work: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run a coroutine function beside the block; raise its error at the block's end."""
    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(done, Exception):
        raise done


@asynccontextmanager
async def _slow(fleet: IllFleet) -> AsyncIterator[None]:
    async def hinder() -> None:
        while True:
            with stopped([engine.process for engine in fleet.ill]):
                await asyncio.sleep(0.45)
            await asyncio.sleep(0.05)

    async with _beside(hinder):
        yield


@asynccontextmanager
async def _killed(fleet: IllFleet) -> AsyncIterator[None]:
    for engine, proxy in zip(fleet.ill, fleet.proxies, strict=True):
        engine.process.kill()
        await proxy.refuse()
    try:
        yield
    finally:
        for proxy in fleet.proxies:
            await proxy.listen()
        await _all_again(fleet)


async def _all_again(fleet: IllFleet, engines: Sequence[Engine] = ()) -> None:
    await asyncio.gather(*(engine.restart() for engine in engines or fleet.ill))


@asynccontextmanager
async def _flapping(fleet: IllFleet) -> AsyncIterator[None]:
    async def flap() -> None:
        while True:
            await _all_again(fleet)
            await asyncio.sleep(2.0)

    try:
        async with _beside(flap):
            yield
    finally:
        await _all_again(fleet)


@asynccontextmanager
async def _poisoned(fleet: IllFleet) -> AsyncIterator[None]:
    engines = [*fleet.ill, *fleet.well]

    async def poison() -> None:
        while True:
            await asyncio.gather(*(fleet.poison(model) for model in ENGINES))
            await asyncio.sleep(5.0)

    async def start_again() -> None:
        while True:
            for engine in engines:
                if not engine.process.alive:
                    engine.start()
            await asyncio.sleep(0.5)

    async with _beside(start_again):
        async with _beside(poison):
            yield
        await asyncio.gather(*(engine.ready() for engine in engines))


@asynccontextmanager
async def _restarted_as(
    fleet: IllFleet, *, case: str = "right", other_root: bool = False, **settings: object
) -> AsyncIterator[None]:
    if other_root:
        root = fleet.folder / "other-weights"
        shutil.copytree(TOKENIZER_DIR, root, dirs_exist_ok=True)
        settings |= {"root": root, "seed": 7}
    await asyncio.gather(*(engine.restart(case, **settings) for engine in fleet.ill))
    try:
        yield
    finally:
        await _all_again(fleet)


@asynccontextmanager
async def _agent_killed(fleet: IllFleet) -> AsyncIterator[None]:
    fleet.parts["agent"].kill()
    try:
        yield
    finally:
        fleet.parts["agent"].start()


@asynccontextmanager
async def _asleep(fleet: IllFleet) -> AsyncIterator[None]:
    async def post(path: str) -> None:
        answers = (asyncio.to_thread(ask, f"{engine.url}{path}", b"") for engine in fleet.ill)
        assert all(answer.status == 200 for answer in await asyncio.gather(*answers))

    await post("/sleep?level=1")
    try:
        yield
    finally:
        await post("/wake_up")


USAGE = r"^(vllm:kv_cache_usage_perc\S*) \S+"
WAYS = (
    _fault("/metrics takes 3 s", Fault(delay_s=3.0), "/metrics"),
    _fault("/metrics hangs", Fault(hang=True), "/metrics", ill_s=SILENT_S),
    _fault("/metrics is 500", Fault(status=500), "/metrics"),
    _fault("/metrics is garbage", Fault(body=b"\x00\xff<html>" * 99), "/metrics"),
    _gauge("KV usage is NaN", USAGE, r"\1 NaN"),
    _gauge("KV usage is negative", USAGE, r"\1 -0.3875"),
    _gauge("KV usage has another name", r"^vllm:kv_cache_usage_perc", "vllm:kv_cache_share"),
    _fault("/health hangs", Fault(hang=True), "/health", ill_s=SILENT_S),
    _fault("/health is 500", Fault(status=500), "/health"),
    Way("stands still: accepts, answers nothing", _standing_still, SILENT_S),
    _fault("chats hang, /health and /metrics answer", Fault(hang=True), CHAT, ill_s=SILENT_S),
    _fault("answers begin and stop", Fault(stall_at=700), CHAT, ill_s=SILENT_S),
    Way("ten times slower", _slow),
    Way("killed: refuses connections", _killed),
    _fault("breaks the connection of every chat", Fault(reset=True), CHAT),
    _fault("ends every answer early", Fault(truncate_at=100), CHAT),
    *map(_status, (400, 401, 404, 429, 500, 501, 503)),
    _fault("answers 200 without a body", Fault(body=b""), CHAT),
    _fault("answers 200 with a page of HTML", Fault(body=b"<html>Log in</html>"), CHAT),
    Way("prompts that kill their engine, every 5 s", _poisoned),
    Way("KV events do not arrive", partial(_restarted_as, case="unreachable")),
    Way("KV events name wrong tokens", partial(_restarted_as, case="wrong tokens")),
    Way("its agent is killed", _agent_killed, WITHOUT_AGENT_S),
    Way("stands still with its agent", partial(_standing_still, agent=True), SILENT_S),
    Way("serves other weights", partial(_restarted_as, other_root=True)),
    Way("has a smaller context", partial(_restarted_as, max_model_len=400)),
    Way("restarts every few seconds", _flapping),
    Way("asleep, and forgotten", _asleep),
)
