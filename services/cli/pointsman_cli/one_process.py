"""`pointsman serve`: a router and a gateway in one process, for a fleet with one gateway.

The gateway calls the router's services within the process, which saves the CPU of gRPC messages at either end. Agents, operators
and other gateways reach the router as usual.
"""

from __future__ import annotations

import asyncio
import sys

import grpc.aio

from pointsman_cli.installed_policies import installed_policies
from pointsman_cli.one_process_settings import OneProcessSettings
from pointsman_common.io import event_loop
from pointsman_common.io.channel import open_channel
from pointsman_common.io.local_calls import LocalChannel
from pointsman_common.io.logs import configure_logs
from pointsman_common.io.settings import InvalidSetting, Tokens, load_settings, reason_with_setting
from pointsman_common.io.tls import TlsSettings
from pointsman_gateway.io.main import serve
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_router.io.main import RouterServer
from pointsman_router.io.settings import RouterSettings


def run_serve(settings: OneProcessSettings) -> None:
    """Run router and gateway until SIGTERM or SIGINT. Blocks. Exits with status 1 and the reason if they cannot start.
    Raises InvalidSetting."""
    configure_logs("serve", settings.log_level)
    router = load_settings("pointsman serve", RouterSettings)
    gateway = load_settings("pointsman serve", GatewaySettings)
    if gateway.processes != 1:
        raise InvalidSetting(gateway, "processes", "must be 1: several processes cannot share a router's process")
    try:
        event_loop.run(_run(router, gateway))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"pointsman serve: {reason_with_setting(error, router, gateway, TlsSettings())}")


async def _run(router: RouterSettings, gateway: GatewaySettings) -> None:
    server = RouterServer(router, Tokens(), installed_policies())
    try:
        await server.start()
        own = server.router.store.address

        def dial(address: str) -> grpc.aio.Channel | LocalChannel:
            return LocalChannel(server.local) if address == own else open_channel(address)

        stop = asyncio.Event()
        routing = asyncio.create_task(server.wait())
        # The router's background work ends only by failing.
        routing.add_done_callback(lambda _: stop.set())
        await serve(gateway.model_copy(update={"routers": [own]}), dial=dial, stop=stop)
        if routing.done():
            routing.result()
        routing.cancel()
    finally:
        await server.stop()
