"""The agent's process: one monitor per engine and one channel per router, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import structlog
import zmq.asyncio
from aiohttp import web

from pointsman_agent.core.engine_address import EngineAddress, parse_engine_address
from pointsman_agent.core.engine_service import parse_engine_service
from pointsman_agent.io.absent_engines import report_absent_engines
from pointsman_agent.io.engine_monitor import EngineMonitor
from pointsman_agent.io.engine_services import follow
from pointsman_agent.io.gpu import GpuSampler
from pointsman_agent.io.instance_monitor import AgentContext
from pointsman_agent.io.monitored_engines import MonitoredEngines
from pointsman_agent.io.settings import AgentSettings
from pointsman_agent.io.state_file import remove_old_states, remove_states
from pointsman_agent.io.status import make_app
from pointsman_agent.io.step_load_receiver import receive_step_loads
from pointsman_common.core.addresses import parse_address
from pointsman_common.io import event_loop
from pointsman_common.io.auth import showing
from pointsman_common.io.channel import ReloadingChannel
from pointsman_common.io.garbage import collect_garbage
from pointsman_common.io.listen_errors import listening
from pointsman_common.io.logs import configure_logs
from pointsman_common.io.settings import Tokens, reason_with_setting
from pointsman_common.io.tls import TlsSettings, client_context

log = structlog.get_logger()

# Interval between two collections of all garbage, s. One takes 16 ms for each engine with a million cached tokens. When Python
# chose the times, they took a fifth of the agent's CPU time, since cached blocks come and go.
COLLECT_INTERVAL_S = 300.0
# Why engines end that end with their agent.
ENDING = "its pod is being stopped"


def run(settings: AgentSettings) -> None:
    """Run the agent until SIGTERM or SIGINT. Blocks. Exits with status 1 and the reason if the agent cannot start."""
    configure_logs("agent", settings.log_level)
    try:
        TlsSettings().for_channel()
        Tokens().of("agent")
        _engine_tls(settings)
    except (ValueError, OSError) as error:
        raise SystemExit(f"pointsman agent: {reason_with_setting(error, settings, TlsSettings())}") from None
    try:
        event_loop.run(_until_signal(settings))
    except OSError as error:
        raise SystemExit(f"pointsman agent: {reason_with_setting(error, settings, TlsSettings())}") from None


async def serve(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Run the agent until `stop` is set, then save the instances' state and return. Tests and `up` call this function, too."""
    async with AsyncExitStack() as resources:
        await _serve(settings, stop, resources)
    log.info("the agent has stopped")


async def _serve(settings: AgentSettings, stop: asyncio.Event, resources: AsyncExitStack) -> None:
    metadata = showing(Tokens(), "agent")
    sampler = await asyncio.to_thread(GpuSampler)
    resources.callback(sampler.close)
    context = zmq.asyncio.Context()
    # Not term(), which blocks the event loop while any socket is open.
    resources.callback(context.destroy, linger=0)
    channels: dict[str, ReloadingChannel] = {}
    for router in settings.routers:
        channels[router] = ReloadingChannel(router)
        resources.push_async_callback(channels[router].close)
    agent_context = AgentContext(
        channels=channels,
        metadata=metadata,
        zmq=context,
        agent_id=f"{socket.gethostname()}-{os.getpid()}",
        state_dir=settings.state_dir,
        report_interval_s=settings.scrape_interval_s,
        consistency_check_interval_s=settings.consistency_check_interval_s,
        save_interval_s=settings.save_interval_s,
    )
    engine_tls = _engine_tls(settings)
    addresses = [parse_engine_address(text) for text in settings.engines]
    # A single engine has all of the node's devices. With several engines each address must name its devices.
    everything = tuple(range(sampler.count)) if len(addresses) == 1 and not settings.engine_services else ()

    def monitor(address: EngineAddress) -> EngineMonitor:
        return EngineMonitor(
            address,
            agent_context,
            scrape_interval_s=settings.scrape_interval_s,
            api_key=settings.engine_api_key.get_secret_value(),
            tls=engine_tls,
            gpus=everything if address.gpus is None else address.gpus,
            sampler=sampler,
        )

    def forget(address: EngineAddress) -> None:
        remove_states(settings.state_dir, address.instance_id(None))

    await asyncio.to_thread(remove_old_states, settings.state_dir, time.time())
    monitors = MonitoredEngines(monitor, forget)
    if settings.metrics_listen:
        with listening(settings, "metrics_listen"):
            await _serve_status(settings.metrics_listen, monitors.all, resources)
    log.info(
        "the agent has started",
        engines=[address.url for address in addresses],
        engine_services=settings.engine_services,
        routers=settings.routers,
        gpus=sampler.count,
        no_gpus=sampler.absent_reason,
    )
    monitors.set_engines("", {address.url: address for address in addresses})
    tasks = [
        asyncio.create_task(
            follow(parse_engine_service(text), partial(monitors.set_engines, text)), name=f"follow {text}"
        )
        for text in settings.engine_services
    ]
    for router, channel in channels.items():
        reporting = report_absent_engines(router, channel, metadata, agent_context.agent_id, monitors.all)
        tasks.append(asyncio.create_task(reporting, name=f"absent engines to {router}"))
    if settings.step_loads_listen:
        receiving = _receive_step_loads(context, settings, monitors.all)
        tasks.append(asyncio.create_task(receiving, name="step loads"))
    stopped, failed = asyncio.create_task(stop.wait()), asyncio.create_task(monitors.failed())
    try:
        # A monitor and the other tasks end only by a fault. The agent then ends, too, so that the fault is noticed.
        await asyncio.wait([stopped, failed, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        for task in (failed, *tasks):
            task.cancel()
        results = await asyncio.gather(failed, *tasks, return_exceptions=True)
        await monitors.stop(ENDING if settings.ends_with_engines and stop.is_set() else "")
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _receive_step_loads(
    context: zmq.asyncio.Context, settings: AgentSettings, monitors: Sequence[EngineMonitor]
) -> None:
    with listening(settings, "step_loads_listen"):
        try:
            await receive_step_loads(context, settings.step_loads_listen, monitors)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None


def _engine_tls(settings: AgentSettings) -> ssl.SSLContext | None:
    """Return a context with the authorities trusted for engines' certificates; None: the system's. Raises OSError or ValueError
    with the name of a file that cannot be used."""
    if settings.engine_ca is None:
        return None
    return client_context(settings.engine_ca)


async def _until_signal(settings: AgentSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    collecting = asyncio.create_task(collect_garbage(COLLECT_INTERVAL_S))
    try:
        await serve(settings, stop)
    finally:
        collecting.cancel()


async def _serve_status(listen: str, monitors: Sequence[EngineMonitor], resources: AsyncExitStack) -> None:
    runner = web.AppRunner(make_app(monitors), access_log=None)
    resources.push_async_callback(runner.cleanup)
    await runner.setup()
    await web.TCPSite(runner, *parse_address(listen).to_listen).start()
