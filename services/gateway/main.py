"""A gateway process: serve until SIGTERM, let open requests end, leave."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
import uvloop
from aiohttp import web

from services.common.auth import is_loopback
from services.common.logs import configure_logs
from services.gateway.app import Gateway
from services.gateway.settings import GatewaySettings

log = structlog.get_logger()


@asynccontextmanager
async def serving(settings: GatewaySettings) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway that serves inside the block, and its base URL. Leaving the block stops accepting, waits up to drain_s for
    open requests, cancels the rest and tells the router. Raises OSError when the address is taken."""
    gateway = Gateway(settings)
    await gateway.start()
    # A client that leaves must cancel its handler: that is what frees the engine.
    runner = web.AppRunner(
        gateway.application(), handler_cancellation=True, access_log=None, shutdown_timeout=settings.drain_s
    )
    try:
        await runner.setup()
        host, _, port = settings.listen.rpartition(":")
        site = web.TCPSite(runner, host.strip("[]"), int(port))
        await site.start()
        bound = runner.addresses[0]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        yield gateway, f"http://{shown}:{bound[1]}"
    finally:
        await runner.cleanup()
        await gateway.close()


async def _serve(settings: GatewaySettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        try:
            _, url = await stack.enter_async_context(serving(settings))
        except (OSError, ValueError) as error:
            # An address that is taken, a keys file that cannot be used: for the operator to read, not to debug.
            raise SystemExit(f"pointsman gateway: {error}") from None
        keys = settings.api_keys_file is not None
        log.info("gateway serves", url=url, gateway_id=settings.gateway_id, keys=keys)
        if not keys and not is_loopback(settings.listen):
            log.warning("everyone who reaches this address may call; set api_keys_file to change that")
        await stop.wait()
        log.info("gateway drains", drain_s=settings.drain_s)


def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Blocks."""
    configure_logs("gateway", settings.log_level)
    uvloop.run(_serve(settings))
