"""Entry point of a gateway process, which serves until SIGTERM and then waits for open requests. A second SIGTERM ends it."""

from __future__ import annotations

import asyncio
import gc
import math
import multiprocessing
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from pointsman_common.core.addresses import parse_address
from pointsman_common.io import event_loop
from pointsman_common.io.auth import is_loopback
from pointsman_common.io.channel import open_channel
from pointsman_common.io.listen_errors import listening
from pointsman_common.io.logs import configure_logs
from pointsman_common.io.settings import reason_with_setting
from pointsman_common.io.tls import server_context, server_credentials
from pointsman_gateway.io.http.client_connection import LINGER_S
from pointsman_gateway.io.http.server import Server
from pointsman_gateway.io.http.server_types import ServerLimits
from pointsman_gateway.io.processes.parent import run_processes
from pointsman_gateway.io.processes.sibling_processes import SiblingProcesses
from pointsman_gateway.io.routes import Gateway
from pointsman_gateway.io.routing.router_stream import Dial
from pointsman_gateway.io.settings import GatewaySettings

if TYPE_CHECKING:
    from pointsman_gateway.io.ext_proc.server import ExtProcServer

log = structlog.get_logger()

# Maximum time that a sibling process waits for a usable model before it listens, s.
JOIN_S = 5.0
# Interval in which a repeated signal counts as the first one, s. A signal to a process group also reaches a process from its
# parent.
SAME_SIGNAL_S = 1.0
# Interval after which a thread must release the interpreter, s (Python's default: 5 ms). While a thread parses or renders a large
# body, each event of the loop waits this long.
SWITCH_S = 0.0005


@asynccontextmanager
async def serving(
    settings: GatewaySettings,
    siblings: SiblingProcesses | None = None,
    hurry: asyncio.Event | None = None,
    dial: Dial = open_channel,
) -> AsyncIterator[tuple[Gateway, str]]:
    """Yield a gateway that serves inside the block, and its base URL. Raises OSError if the address is in use. `dial` opens the
    channels to routers.

    At the end of the block the gateway stops accepting and waits for open requests until drain_timeout_s has passed or `hurry`
    is set. It then cancels the remaining requests and reports to the router.
    """
    gateway = Gateway(settings, siblings, dial)
    await gateway.start()
    limits = ServerLimits(
        settings.max_body_bytes,
        settings.max_buffered_body_bytes,
        settings.max_buffered_answer_bytes,
        settings.max_connections,
        body_s=settings.body_timeout_s,
        idle_s=settings.keepalive_timeout_s,
        stall_s=settings.idle_timeout_s,
        min_read_bytes_per_s=settings.min_read_bytes_per_s,
    )
    server = Server(gateway, limits)
    servers: list[Server | ExtProcServer] = [server]
    proxies = None
    if settings.ext_proc_listen:
        from pointsman_gateway.io.ext_proc.proxy_stream import Streams
        from pointsman_gateway.io.ext_proc.server import ExtProcServer

        streams = Streams(gateway, limits, server.bodies, server.answers)
        proxies = ExtProcServer(streams, lambda: gateway.usable, reuse_port=siblings is not None)
        servers.append(proxies)
    try:
        if siblings is not None:
            # Clients cannot choose among processes of one address. A process that has not received the fleet yet would refuse
            # requests that its siblings place. If no process receives a fleet, all serve after JOIN_S and report the reason.
            with suppress(TimeoutError):
                async with asyncio.timeout(JOIN_S):
                    while not gateway.usable:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
        tls = _tls(settings)
        with listening(settings, "listen"):
            bound = await server.start(parse_address(settings.listen), reuse_port=siblings is not None, tls=tls)
        if proxies is not None:
            credentials = _ext_proc_credentials(settings)
            with listening(settings, "ext_proc_listen"):
                await proxies.start(settings.ext_proc_listen, credentials)
            gateway.ext_proc_port, gateway.proxy_streams = proxies.port, streams.open
            log.info("gateway serves proxies", port=proxies.port)
        yield gateway, f"http{'s' if tls else ''}://{bound}"
    finally:
        closing: asyncio.Future[Any] = asyncio.gather(*(each.close(settings.drain_timeout_s) for each in servers))
        if hurry is not None:
            hurried: asyncio.Future[Any] = asyncio.create_task(hurry.wait())
            await asyncio.wait({closing, hurried}, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
            if not closing.done():
                for each in servers:
                    each.cancel_all()
                await asyncio.wait({closing}, timeout=LINGER_S)
                server.abort_all()
                if proxies is not None:
                    await proxies.abort_all()
        await closing
        await gateway.close()


def _ext_proc_credentials(settings: GatewaySettings) -> grpc.ServerCredentials | None:
    if settings.ext_proc_cert is None or settings.ext_proc_key is None:
        return None
    return server_credentials(settings.ext_proc_cert, settings.ext_proc_key, settings.ext_proc_client_ca)


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Return the TLS context for clients; None for plain HTTP. Raises OSError and ValueError for files that cannot be used."""
    if settings.tls_cert is None:
        return None
    return server_context(settings.tls_cert, settings.tls_key, settings.tls_client_ca, ["http/1.1"])


async def serve(
    settings: GatewaySettings,
    siblings: SiblingProcesses | None = None,
    ready: Connection | None = None,
    dial: Dial = open_channel,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until `stop` is set. Raises SystemExit with the reason if it cannot start."""
    stop, hurry = stop or asyncio.Event(), asyncio.Event()
    if (parent := multiprocessing.parent_process()) is not None:
        asyncio.get_running_loop().add_reader(parent.sentinel, stop.set)
    stopped_at = math.inf

    def signalled() -> None:
        nonlocal stopped_at
        now = time.monotonic()
        if stopped_at == math.inf:  # the first signal, though `stop` may be set for another reason
            stopped_at = now
            stop.set()
        elif now - stopped_at > SAME_SIGNAL_S:
            hurry.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    async with AsyncExitStack() as stack:
        try:
            gateway, url = await stack.enter_async_context(serving(settings, siblings, hurry, dial))
        except (OSError, ValueError) as error:
            # An address in use or an unusable keys file is the operator's to mend: a message, not a traceback.
            raise SystemExit(f"pointsman gateway: {reason_with_setting(error, settings)}") from None
        keys = gateway.keys.needed
        log.info("gateway serves", url=url, gateway_id=settings.gateway_id, keys=keys)
        listens = filter(None, (settings.listen, settings.ext_proc_listen))
        if not keys and not all(map(is_loopback, listens)):
            log.warning("no API keys are set: everyone who reaches this address may send requests")
        if ready is not None:
            ready.send(None)
        # Present objects stay for the life of the process, so collections skip them. A higher threshold makes collections rarer
        # than every few hundred objects of a request.
        sys.setswitchinterval(SWITCH_S)
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        await stop.wait()
        if parent is not None:
            asyncio.get_running_loop().remove_reader(parent.sentinel)
        log.info("gateway drains", drain_timeout_s=settings.drain_timeout_s)


def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. Blocks."""
    configure_logs("gateway", settings.log_level)
    if settings.processes == 1:
        event_loop.run(serve(settings))
        return
    try:
        run_processes(settings, _child)
    except OSError as error:
        raise SystemExit(f"pointsman gateway: {error}") from None


def _child(settings: GatewaySettings, siblings: SiblingProcesses, ready: Connection) -> None:
    configure_logs("gateway", settings.log_level)
    event_loop.run(serve(settings, siblings, ready))
