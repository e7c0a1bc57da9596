"""The agent's process: one watch per engine, one channel per router, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import structlog
import zmq.asyncio
from aiohttp import web

from services.agent.gpu import GpuSampler
from services.agent.instance import Surroundings
from services.agent.settings import AgentSettings
from services.agent.status import make_app
from services.agent.step_loads import receive
from services.agent.target import parse_target
from services.agent.watch import EngineWatch
from services.common.auth import bearer
from services.common.channel import LastingChannel
from services.common.logs import configure_logs
from services.common.settings import Tokens
from services.common.tls import Tls

log = structlog.get_logger()


def run(settings: AgentSettings) -> None:
    """Watch and report until a signal ends it. Blocks. Raises OSError when `metrics_listen` is taken."""
    configure_logs("agent", settings.log_level)
    try:
        Tls().for_channel()
    except (ValueError, OSError) as error:
        raise SystemExit(f"pointsman agent: {error}") from None
    asyncio.run(_until_signal(settings))


async def serve(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Watch and report until `stop` is set, then save what the instances know and leave. Shared with tests and `up`."""
    tokens = Tokens()
    sampler = await asyncio.to_thread(GpuSampler)
    context = zmq.asyncio.Context()
    channels = {router: LastingChannel(router) for router in settings.routers}
    around = Surroundings(
        channels=channels,
        metadata=bearer(tokens.of("agent")),
        zmq=context,
        agent_id=f"{socket.gethostname()}-{os.getpid()}",
        state_dir=settings.state_dir,
        bookmark_interval_s=settings.bookmark_interval_s,
        save_interval_s=settings.save_interval_s,
    )
    targets = [parse_target(text) for text in settings.engines]
    # A lone engine owns the node's devices; several have to say which are whose.
    everything = tuple(range(sampler.count)) if len(targets) == 1 else ()
    watches = [
        EngineWatch(
            target,
            around,
            scrape_interval_s=settings.scrape_interval_s,
            api_key=settings.engine_api_key.get_secret_value(),
            gpus=everything if target.gpus is None else target.gpus,
            sampler=sampler,
        )
        for target in targets
    ]
    runner = await _serve_status(settings.metrics_listen, watches)
    log.info(
        "agent_started",
        engines=[target.url for target in targets],
        routers=settings.routers,
        gpus=sampler.count,
        no_gpus=sampler.absent_reason,
    )
    tasks = [asyncio.create_task(watch.run(), name=f"watch {watch.target.url}") for watch in watches]
    if settings.loads_listen:
        tasks.append(asyncio.create_task(receive(context, settings.loads_listen, watches), name="step loads"))
    stopped = asyncio.create_task(stop.wait())
    try:
        # A watch, or the receiver of loads, never ends by itself: if one does, the agent is broken and says so by ending.
        await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        if runner is not None:
            await runner.cleanup()
        for channel in channels.values():
            await channel.close()
        context.term()
        sampler.close()
    for result in results:
        if isinstance(result, Exception):
            raise result
    log.info("agent_stopped")


async def _until_signal(settings: AgentSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)


async def _serve_status(listen: str, watches: list[EngineWatch]) -> web.AppRunner | None:
    if not listen:
        return None
    host, _, port = listen.rpartition(":")
    runner = web.AppRunner(make_app(watches), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host.strip("[]") or None, int(port)).start()
    return runner
