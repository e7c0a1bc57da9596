"""A real Envoy whose requests an endpoint picker places, configured as Gateways configure theirs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.http_request import ask, serves
from tests.support.processes.process import Process, free_port
from tests.support.repository import REPOSITORY

BINARY = REPOSITORY / ".venv-envoy" / "bin" / "envoy"
START_S = 60.0
_TYPE = "type.googleapis.com/envoy."
DESTINATION = "x-gateway-destination-endpoint"


@dataclass(frozen=True)
class EnvoySettings:
    """What an Envoy is configured with."""

    endpoints: Sequence[str]
    """The engines, IP:PORT each, among which Envoy chooses where no picker has."""
    pickers: Sequence[int] = ()
    """Ports of the pickers; without one Envoy alone chooses."""
    pickers_up: bool = True
    """Whether to wait until the pickers are healthy."""
    tls: bool = False
    """Whether Envoy dials the pickers by TLS; it does not verify their certificates, as Gateways do not."""
    fail_open: bool = False
    """Whether requests pass if the picker does not answer."""
    retries: int = 0
    """How often a request is sent again, to the next endpoint that the picker has named."""
    original_dst: bool = False
    """Whether Envoy connects to the endpoint in the header, whatever it is; it then takes no list."""
    only_with: Mapping[str, str] = field(default_factory=dict)
    """Fields without which a request takes another route, which is answered with 418."""
    most_requests: int = 1_024
    """How many requests Envoy has open at the engines."""
    subset: str = ""
    """Header whose endpoints become the subset."""
    body_modes: tuple[str, str] = ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED")
    """Processing modes of the bodies of request and response."""


@contextmanager
def envoy(settings: EnvoySettings, folder: Path) -> Iterator[str]:
    """Run an Envoy inside the block; yield its base URL."""
    with _started(settings, folder) as (process, ready, url):
        process.wait_ready(ready, within_s=START_S)
        yield url


@asynccontextmanager
async def envoy_beside(settings: EnvoySettings, folder: Path) -> AsyncIterator[str]:
    """As envoy(), before pickers that run in this event loop."""
    with _started(settings, folder) as (process, ready, url):
        await asyncio.to_thread(process.wait_ready, ready, within_s=START_S)
        try:
            yield url
        finally:
            await asyncio.to_thread(process.stop, within_s=30)


@contextmanager
def _started(settings: EnvoySettings, folder: Path) -> Iterator[tuple[Process, Callable[[], bool], str]]:
    port, admin = free_port(), free_port()
    config = folder / f"envoy-{port}.json"
    config.write_text(json.dumps(configuration(settings, port, admin)))
    process = Process(f"envoy-{port}", command(config), folder / f"envoy-{port}.log")
    process.start()
    try:
        yield process, partial(is_ready, settings, f"http://127.0.0.1:{admin}"), f"http://127.0.0.1:{port}"
    finally:
        process.stop(within_s=30)


def command(config: Path) -> list[str]:
    """Return the command line of an Envoy with one worker."""
    return [str(BINARY), "-c", str(config), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]


def is_ready(settings: EnvoySettings, admin: str) -> bool:
    """Return whether an Envoy with the admin URL `admin` serves, and knows its pickers to be healthy."""
    if not serves(admin, "/ready"):
        return False
    if not settings.pickers_up:
        return True
    clusters = ask(admin + "/clusters").text
    return all(f"picker::127.0.0.1:{port}::health_flags::healthy" in clusters for port in settings.pickers)


def configuration(settings: EnvoySettings, port: int, admin: int) -> Mapping[str, Any]:
    """Return Envoy's static configuration."""
    filters: list[Mapping[str, Any]] = []
    if settings.subset:
        rule = {
            "header": settings.subset,
            "on_header_present": {"metadata_namespace": "envoy.lb.subset_hint", "key": f"{DESTINATION}-subset"},
            "remove": True,
        }
        filters.append(
            _typed("envoy.filters.http.header_to_metadata", "extensions.filters.http.header_to_metadata.v3.Config",
                   request_rules=[rule])
        )  # fmt: skip
    if settings.pickers:
        filters.append(_ext_proc(settings))
    filters.append(_typed("envoy.filters.http.router", "extensions.filters.http.router.v3.Router"))
    route: dict[str, Any] = {"cluster": "engines", "timeout": "0s"}
    if settings.retries:
        route["retry_policy"] = {
            "retry_on": "connect-failure,reset-before-request,5xx",
            "num_retries": settings.retries,
        }
    named = [{"name": name, "string_match": {"exact": value}} for name, value in settings.only_with.items()]
    routes: list[Mapping[str, Any]] = [{"match": {"prefix": "/", "headers": named}, "route": route}]
    routes.append({"match": {"prefix": "/"}, "direct_response": {"status": 418}})
    host = {"name": "all", "domains": ["*"], "routes": routes}
    manager = _typed(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="http",
        route_config={"virtual_hosts": [host]},
        http_filters=filters,
    )
    listener = {"address": _address("127.0.0.1", port), "filter_chains": [{"filters": [manager]}]}
    clusters = [_ORIGINAL_DST if settings.original_dst else _engines(settings)]
    if settings.pickers:
        clusters.append(_pickers(settings.pickers, tls=settings.tls))
    return {
        "admin": {"address": _address("127.0.0.1", admin)},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }


def _ext_proc(settings: EnvoySettings) -> Mapping[str, Any]:
    request_mode, response_mode = settings.body_modes
    return _typed(
        "envoy.filters.http.ext_proc",
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        processing_mode={
            "request_header_mode": "SEND", "response_header_mode": "SEND",
            "request_body_mode": request_mode, "response_body_mode": response_mode,
            "request_trailer_mode": "SEND", "response_trailer_mode": "SEND",
        },
        # A request may be held, parked or prefilled elsewhere before it is answered.
        message_timeout="1000s",
        failure_mode_allow=settings.fail_open,
        response_attributes=["upstream.address"],
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )  # fmt: skip


def _engines(settings: EnvoySettings) -> Mapping[str, Any]:
    round_robin = _typed(
        "envoy.load_balancing_policies.round_robin", "extensions.load_balancing_policies.round_robin.v3.RoundRobin"
    )
    override = _typed(
        "envoy.load_balancing_policies.override_host",
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": DESTINATION}],
        fallback_policy={"policies": [{"typed_extension_config": round_robin}]},
    )
    return {
        "name": "engines",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": override}]},
        "load_assignment": _assignment("engines", [endpoint.rpartition(":")[::2] for endpoint in settings.endpoints]),
        "circuit_breakers": {"thresholds": [{"max_requests": settings.most_requests}]},
    }


_ORIGINAL_DST: Mapping[str, Any] = {
    "name": "engines",
    "type": "ORIGINAL_DST",
    "lb_policy": "CLUSTER_PROVIDED",
    "connect_timeout": "1s",
    "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
}


def _pickers(ports: Sequence[int], *, tls: bool) -> Mapping[str, Any]:
    http2 = _typed(
        "x", "extensions.upstreams.http.v3.HttpProtocolOptions", explicit_http_config={"http2_protocol_options": {}}
    )
    verified_by_nobody = _typed(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context={"alpn_protocols": ["h2"]},
    )
    return {
        **({"transport_socket": verified_by_nobody} if tls else {}),
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        # Envoy lets a request pass without its picker only until a piece of the body is sent, so it must know before.
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "0.2s",
                "no_traffic_interval": "0.2s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {}},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2["typed_config"]
        },
        "load_assignment": _assignment("picker", [("127.0.0.1", port) for port in ports]),
    }


def _assignment(name: str, hosts: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
    endpoints = [{"endpoint": {"address": _address(host, int(port))}} for host, port in hosts]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(host: str, port: int) -> Mapping[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _typed(name: str, type_: str, **config: Any) -> Mapping[str, Any]:
    return {"name": name, "typed_config": {"@type": _TYPE + type_, **config}}
