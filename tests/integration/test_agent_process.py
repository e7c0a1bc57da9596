"""The agent as people run it: a process with flags, its own HTTP surface, signals; and a replay bigger than ZeroMQ's queues."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import zmq.asyncio

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import END_OF_REPLAY
from pointsman_agent.io.kv_subscriber import KvEventSource, KvSubscriber
from pointsman_common.core.block_keys import prompt_keys
from pointsman_common.core.key_report_types import Tier
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter
from tests.support.kv_events import store, tokens_of
from tests.support.processes.process import free_port
from tests.support.waiting import eventually


async def test_the_command_reports_serves_its_figures_and_saves_when_asked_to_end(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    engine, router = FakeEngine(context), FakeRouter()
    await engine.start()
    await router.start()
    listen = f"127.0.0.1:{free_port()}"
    flags = [
        "--engines",
        engine.url,
        "--routers",
        router.address,
        "--state-dir",
        str(tmp_path),
        "--metrics-listen",
        listen,
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from pointsman_cli.main import main; main()",
        "agent",
        *flags,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await engine.publish(store((1, 2)))
        name = f"127.0.0.1:{engine.port}"
        await eventually(lambda: len(router.keys(name) or ()) == 4, "four keys")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{listen}/metrics") as answer:
                page = await answer.text()
            async with session.get(f"http://{listen}/health") as answer:
                health = await answer.json()
        assert f'pointsman_agent_keys{{instance="{name}",tier="device"}} 4.0' in page
        assert f'pointsman_agent_report_connected{{instance="{name}",router="{router.address}"}} 1.0' in page
        assert f'kind="snapshots",router="{router.address}"}} 1.0' in page
        assert f'pointsman_agent_engine_up{{engine="{engine.url}"}} 1.0' in page
        assert health["engines"][0]["instances"][0]["routers"] == {router.address: "connected"}
        process.send_signal(signal.SIGTERM)
        _, logs = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0, logs.decode()
        assert b"Traceback" not in logs
        assert len(os.listdir(tmp_path)) == 1
        assert router.problems == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await router.stop()
        await engine.stop()


async def test_a_replay_that_loses_messages_on_the_way_is_asked_for_again(context: zmq.asyncio.Context) -> None:
    """ROUTER sockets drop messages beyond a peer's queue limit; here every second replay loses some messages in the middle."""
    engine = FakeEngine(context)
    await engine.start()
    paths = [(1, *range(2, depth + 2)) for depth in range(40)]
    for depth, path in enumerate(paths):
        await engine.publish(store(path, first=depth), mute=True)
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    questions = 0

    async def answer() -> None:
        nonlocal questions
        while True:
            client, _, start = await router.recv_multipart()
            questions += 1
            first = int.from_bytes(start, "big")
            for seq, payload in engine.buffer[first:]:
                if questions % 2 and first + 5 < seq < first + 15:
                    continue
                await router.send_multipart([client, b"", b"", seq.to_bytes(8, "big"), payload])
            await router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    answering = asyncio.create_task(answer())
    cached_blocks = CachedBlocks("tiny")
    source = KvEventSource(f"tcp://127.0.0.1:{engine.events_port}", f"tcp://127.0.0.1:{port}")
    subscriber = KvSubscriber(context, source, cached_blocks, lambda: None)
    try:
        assert await subscriber.start()
        assert set(cached_blocks.keys(Tier.DEVICE)) == set(prompt_keys(tokens_of(paths[-1]), "tiny"))
        assert (subscriber.applied, subscriber.counts.lost, questions) == (39, 0, 2)
    finally:
        subscriber.close()
        answering.cancel()
        await asyncio.wait([answering])
        router.close(linger=0)
        await engine.stop()
