"""Follows the EndpointSlices of Services in Kubernetes, whose endpoints are engines, by the client library."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import structlog

from pointsman_agent.core.engine_address import EngineAddress
from pointsman_agent.core.engine_service import EngineService, ServiceEndpoints

log = structlog.get_logger()

# How long a watch lasts before the slices are listed again, s: the server may end it sooner. A connection that dies without a
# word ends it ANSWER_S later.
WATCH_S = 300
# Timeouts of a connection and of an answer, s.
CONNECT_S, ANSWER_S = 5, 15
# Pause after a failure, s, doubled by each further one, and before each list.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 15.0


async def follow(
    service: EngineService, on_engines: Callable[[Mapping[str, EngineAddress], Collection[str]], None]
) -> None:
    """Call `on_engines` with all engines of a Service, by URL, and the URLs of those that are not ready, whenever they change,
    until cancelled. While the API server does not answer, the last ones stay."""
    # 65 MB of memory, which only an agent that needs it has.
    from kubernetes_asyncio import client

    await _configure()
    endpoints = ServiceEndpoints(service)
    pause_s = FIRST_PAUSE_S
    async with client.ApiClient() as connection:
        api = client.DiscoveryV1Api(connection)
        while True:
            try:
                version = await _list(api, service, endpoints)
                on_engines(endpoints.engines(), endpoints.not_ready())
                pause_s = FIRST_PAUSE_S
                async for kind, changed in _watch(api, service, version):
                    endpoints.apply(kind, changed)
                    on_engines(endpoints.engines(), endpoints.not_ready())
                await asyncio.sleep(FIRST_PAUSE_S)
            # The library passes on what aiohttp, ssl and its own checks raise.
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                log.warning("a service's engines are not followed", service=str(service), reason=reason)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)


async def _configure() -> None:
    """Read the pod's service account, or outside a cluster the file that KUBECONFIG names. Raises RuntimeError."""
    from kubernetes_asyncio import config

    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except config.ConfigException:
        try:
            # The library itself reads the variable once, when it is imported.
            await config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
        except config.ConfigException as error:
            raise RuntimeError(f"no service account and no kubeconfig: {error}") from None


async def _list(api: Any, service: EngineService, endpoints: ServiceEndpoints) -> str:
    """Read all slices; return the version from which on a watch tells their changes. Mutates `endpoints`."""
    answer = await api.list_namespaced_endpoint_slice(
        service.namespace,
        label_selector=service.label_selector,
        _preload_content=False,
        _request_timeout=(CONNECT_S, ANSWER_S),
    )
    listed = json.loads(await answer.read())
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {listed.get('message', '')}")
    endpoints.replace(listed["items"])
    return str(listed["metadata"]["resourceVersion"])


async def _watch(api: Any, service: EngineService, version: str) -> Any:
    """Yield the kind and the object of each change, until the watch ends."""
    from kubernetes_asyncio import watch

    async with watch.Watch() as stream:
        async for event in stream.stream(
            api.list_namespaced_endpoint_slice,
            service.namespace,
            label_selector=service.label_selector,
            resource_version=version,
            timeout_seconds=WATCH_S,
            _request_timeout=(CONNECT_S, WATCH_S + ANSWER_S),
        ):
            yield event["type"], event["raw_object"]
