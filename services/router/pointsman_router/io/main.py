"""The router process: one Router with its gRPC services, health service, reflection, metrics and console."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import sys

import grpc.aio
import structlog
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CONTENT_TYPE_LATEST

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2, placement_pb2_grpc
from pointsman_common.core.addresses import Address, parse_address
from pointsman_common.io import event_loop
from pointsman_common.io.auth import TokenInterceptor, is_loopback
from pointsman_common.io.channel import SERVER_OPTIONS
from pointsman_common.io.garbage import collect_garbage
from pointsman_common.io.listen_errors import listening
from pointsman_common.io.listening import listen_on
from pointsman_common.io.local_calls import LocalServer
from pointsman_common.io.logs import configure_logs
from pointsman_common.io.metrics_page import metrics_page
from pointsman_common.io.settings import Tokens, reason_with_setting
from pointsman_common.io.tls import TlsSettings
from pointsman_router.core.policy.registry import POLICIES, Policies
from pointsman_router.io.console.console import Console
from pointsman_router.io.console.decision_stream import DecisionStream
from pointsman_router.io.router import Router
from pointsman_router.io.rpc.agent_service import AGENT_SERVICE, AgentService, add_agent_service
from pointsman_router.io.rpc.fleet_service import FleetService
from pointsman_router.io.rpc.placement_service import PlacementService
from pointsman_router.io.settings import RouterSettings

log = structlog.get_logger()

PLACEMENT_SERVICE = placement_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name
FLEET_SERVICE = fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name

# How long open calls may still run at shutdown, s. Unary calls take milliseconds; streams never end by themselves.
SHUTDOWN_GRACE_S = 0.3


class RouterServer:
    """A router and its listening servers. `port` is the port of the gRPC server; it is 0 before `start`. `local` has the services
    that a gateway of this process calls."""

    def __init__(self, settings: RouterSettings, tokens: Tokens, policies: Policies = POLICIES) -> None:
        self.settings = settings
        self.router = Router(settings, policies)
        bound = {"agent": settings.agents_file, "gateway": settings.gateways_file}
        interceptor = TokenInterceptor(tokens, {role: file for role, file in bound.items() if file is not None})
        tls = TlsSettings()
        self._credentials = tls.for_server()
        for listen in filter(None, (settings.listen, settings.console_listen)):
            if interceptor.open and not settings.insecure and not is_loopback(listen):
                raise ValueError(
                    f"refusing to listen on {listen} without tokens: set POINTSMAN_TOKEN_DIR (or the tokens), or --insecure"
                )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(interceptors=[interceptor], options=SERVER_OPTIONS)
        add_agent_service(
            AgentService(self.router, functools.partial(interceptor.may_speak_for, "agent")), self._server
        )
        placement = PlacementService(self.router, functools.partial(interceptor.may_speak_for, "gateway"))
        fleet = FleetService(self.router)
        self.local = LocalServer()
        for server in (self._server, self.local):
            placement_pb2_grpc.add_PlacementServiceServicer_to_server(placement, server)  # type: ignore[arg-type]
            fleet_pb2_grpc.add_FleetServiceServicer_to_server(fleet, server)  # type: ignore[arg-type]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            reflection.enable_server_reflection(
                (AGENT_SERVICE, PLACEMENT_SERVICE, FLEET_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME),
                self._server,
            )
        self._tasks: set[asyncio.Task[None]] = set()
        self._web: web.AppRunner | None = None
        self.console: Console | None = None
        if settings.console_listen:
            news = DecisionStream(self.router.decisions, fleet.without_candidates)
            self.console = Console(fleet, news, interceptor, settings.console_listen, tls.for_console())
        self.port = 0

    async def start(self) -> None:
        """Start all servers and the router's background work. Raises OSError if an address is in use."""
        with listening(self.settings, "listen"):
            self.port = listen_on(self._server, self.settings.listen, self._credentials)
        self.router.store.address = self.settings.advertise or _reachable(self.settings.listen, self.port)
        await self._server.start()
        for service in (AGENT_SERVICE, FLEET_SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self.router.on_ready(self._serve_placements)
        self._tasks.add(asyncio.create_task(self.router.run()))
        if self.settings.metrics_listen:
            await self._start_metrics()
        if self.console is not None:
            with listening(self.settings, "console_listen"):
                await self.console.start()
            reached = _reachable(self.settings.console_listen, self.console.port)
            self.router.console_url = self.settings.console_advertise or f"{self.console.scheme}://{reached}"
            log.info("console is listening", address=self.console.address)
        log.info("router is listening", address=self.settings.listen, router_id=self.settings.router_id)

    async def wait(self) -> None:
        """Wait until the background work ends, and raise its error. It ends only by failing."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """Release the pools, end the gateways' and agents' streams, end the open calls, stop the servers and close the log."""
        await self._health.enter_graceful_shutdown()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.router.end_sessions()
        self.router.end_reports()
        await self._server.stop(SHUTDOWN_GRACE_S)
        if self.console is not None:
            await self.console.stop()
        if self._web is not None:
            await self._web.cleanup()
        self.router.decisions.close()
        if self.router.tracer is not None:
            await self.router.tracer.close()

    def _serve_placements(self, ready: bool) -> None:
        # Only the overall status ("") and PlacementService depend on `ready`: FleetService and AgentService always serve.
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", PLACEMENT_SERVICE):
            task = asyncio.ensure_future(self._health.set(service, status))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _start_metrics(self) -> None:
        async def metrics(_: web.Request) -> web.Response:
            body = await metrics_page(self.router.telemetry.registry)
            return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

        async def healthy(_: web.Request) -> web.Response:
            ready = self.router.ready
            answer = {"router_id": self.settings.router_id, "ready": ready}
            return web.json_response(answer, status=200 if ready else 503)

        async def livez(_: web.Request) -> web.Response:
            return web.json_response({"router_id": self.settings.router_id})

        app = web.Application()
        app.add_routes([web.get("/metrics", metrics), web.get("/health", healthy), web.get("/livez", livez)])
        self._web = web.AppRunner(app, access_log=None)
        await self._web.setup()
        with listening(self.settings, "metrics_listen"):
            await web.TCPSite(self._web, *parse_address(self.settings.metrics_listen).to_listen).start()


def _reachable(listen: str, port: int) -> str:
    """Return the HOST:PORT at which others reach what listens at `listen` with the port `port`."""
    address = parse_address(listen)
    return str(Address(socket.gethostname() if address.is_wildcard else address.host, port))


def run(settings: RouterSettings, policies: Policies = POLICIES) -> None:
    """Run a router until SIGTERM or SIGINT. Exits with status 1 and the reason if it cannot start. `policies`: those that
    operators can choose. Raises InvalidSetting."""
    configure_logs("router", settings.log_level)
    try:
        event_loop.run(_run(settings, policies))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"pointsman router: {reason_with_setting(error, settings, TlsSettings())}")


async def _run(settings: RouterSettings, policies: Policies) -> None:
    server = RouterServer(settings, Tokens(), policies)
    try:
        await server.start()
    except BaseException:
        await server.stop()
        raise
    collecting = asyncio.ensure_future(collect_garbage())
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    waiting = asyncio.ensure_future(server.wait())
    stopping = asyncio.ensure_future(stopped.wait())
    done, _ = await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    waiting.cancel()
    collecting.cancel()
    await server.stop()
    if waiting in done:
        with contextlib.suppress(asyncio.CancelledError):
            waiting.result()
