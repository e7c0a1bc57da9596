"""The part of a Kubernetes API server that serves EndpointSlices: lists, watches, and how they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def endpoint_slice(
    name: str,
    endpoints: list[dict[str, Any]],
    *,
    service: str = "vllm",
    ports: list[dict[str, Any]] | None = None,
    address_type: str = "IPv4",
    version: int = 1,
) -> dict[str, Any]:
    """Return an EndpointSlice as an API server answers it."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "generateName": f"{service}-",
            "namespace": "llm",
            "uid": "6d1f6f0e-3a57-4d5c-8a43-0d8e8b1f3f55",
            "resourceVersion": str(version),
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": service,
            },
        },
        "addressType": address_type,
        "endpoints": endpoints,
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}] if ports is None else ports,
    }


def endpoint(*addresses: str, ready: bool | None = True, terminating: bool = False, **more: Any) -> dict[str, Any]:
    """Return an endpoint of a slice. `ready` None: the condition is absent."""
    conditions: dict[str, Any] = {"serving": ready is not False, "terminating": terminating}
    if ready is not None:
        conditions["ready"] = ready
    return {
        "addresses": list(addresses),
        "conditions": conditions,
        "nodeName": "node-1",
        "targetRef": {"kind": "Pod", "name": f"vllm-{addresses[0][-1]}", "namespace": "llm"},
        "zone": "a",
    } | more


class FakeKubernetes:
    """Serves the slices in `slices`, and sends changes to those who watch."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.queries: list[dict[str, str]] = []
        self.status = 200  # of all answers
        self.token = ""
        self._changes: list[tuple[int, dict[str, Any]]] = []
        self._watching: set[asyncio.Queue[dict[str, Any] | None]] = set()

    def change(self, kind: str, changed: dict[str, Any]) -> None:
        """Apply a change, and tell it."""
        self.version += 1
        changed["metadata"]["resourceVersion"] = str(self.version)
        name = changed["metadata"]["name"]
        if kind == "DELETED":
            self.slices.pop(name)
        else:
            self.slices[name] = changed
        event = {"type": kind, "object": changed}
        self._changes.append((self.version, event))
        self.send(event)

    def send(self, event: dict[str, Any] | None) -> None:
        """Send an event to all watches; None ends them."""
        for queue in self._watching:
            queue.put_nowait(event)

    @asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Path]:
        """Serve; yield a kubeconfig file in `folder`."""
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(_kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}")))
        try:
            yield file
        finally:
            self.send(None)
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        self.token = request.headers.get("Authorization", "")
        if self.status != 200:
            refused = {"kind": "Status", "status": "Failure", "message": "no", "code": self.status}
            return web.json_response(refused, status=self.status)
        if request.query.get("watch") == "True":
            return await self._watch(request)
        items = [
            endpoint_slice
            for endpoint_slice in self.slices.values()
            if request.query["labelSelector"]
            == f"kubernetes.io/service-name={endpoint_slice['metadata']['labels']['kubernetes.io/service-name']}"
        ]
        return web.json_response(
            {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"resourceVersion": str(self.version)},
                "items": items,
            }
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for version, event in self._changes:
            if version > int(request.query["resourceVersion"]):
                queue.put_nowait(event)
        self._watching.add(queue)
        try:
            while (change := await queue.get()) is not None:
                await answer.write(json.dumps(change).encode() + b"\n")
        finally:
            self._watching.discard(queue)
        return answer

    @property
    def watches(self) -> int:
        """Number of open watches."""
        return len(self._watching)


def _kubeconfig(server: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": server}}],
        "users": [{"name": "agent", "user": {"token": "secret"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "agent"}}],
    }
