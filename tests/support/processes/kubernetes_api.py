"""A stand-in for Kubernetes' API server, for programs that install objects: it validates by schema and keeps what it accepts.

It has discovery of the kinds in RESOURCES, create, read, list by labels, server-side apply of whole objects, update and delete.
It has no controllers, so no pod starts, and no merge: an apply replaces the object, as if it had one owner.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tools import check_deploy

# Group and version -> plural -> kind. Kinds in CLUSTER_WIDE have no namespace.
RESOURCES = {
    "v1": {"configmaps": "ConfigMap", "secrets": "Secret", "services": "Service", "serviceaccounts": "ServiceAccount"},
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet", "daemonsets": "DaemonSet"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "rbac.authorization.k8s.io/v1": {"clusterroles": "ClusterRole", "clusterrolebindings": "ClusterRoleBinding"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor", "prometheusrules": "PrometheusRule"},
}
KINDS = {plural: kind for plurals in RESOURCES.values() for plural, kind in plurals.items()}
CLUSTER_WIDE = {"clusterroles", "clusterrolebindings"}


class KubernetesApi(ThreadingHTTPServer):
    """The server; `objects` has what it keeps, by path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def names(self, kind: str) -> set[str]:
        """Return the names of the objects of a kind."""
        return {str(o["metadata"]["name"]) for o in self.objects.values() if o["kind"] == kind}


@contextmanager
def kubernetes_api() -> Iterator[KubernetesApi]:
    """Serve on a free port of the loopback interface."""
    server = KubernetesApi()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _discovery(path: str) -> dict[str, Any] | None:
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for version in RESOURCES:
            if "/" in version:
                served = {"groupVersion": version, "version": version.partition("/")[2]}
                groups.append({"name": version.partition("/")[0], "versions": [served], "preferredVersion": served})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    for version, plurals in RESOURCES.items():
        if path in (f"/api/{version}", f"/apis/{version}"):
            verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
            resources = [
                {"name": plural, "kind": kind, "namespaced": plural not in CLUSTER_WIDE, "verbs": verbs}
                for plural, kind in plurals.items()
            ]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
    return None


class _Handler(BaseHTTPRequestHandler):
    server: KubernetesApi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        with self.server.lock:
            if found := _discovery(url.path) or self.server.objects.get(url.path):
                self._answer(200, found)
            elif kind := KINDS.get(url.path.rpartition("/")[2]):
                wanted = dict(
                    pair.split("=", 1) for pair in parse_qs(url.query).get("labelSelector", [""])[0].split(",") if pair
                )
                items = [
                    item
                    for path, item in sorted(self.server.objects.items())
                    if path.startswith(f"{url.path}/") and wanted.items() <= item["metadata"].get("labels", {}).items()
                ]
                self._answer(200, {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {}, "items": items})
            else:
                self._fail(404, "NotFound")

    def do_POST(self) -> None:
        item = self._body()
        self._keep(f"{urlsplit(self.path).path}/{item['metadata']['name']}", item, 201)

    def do_PATCH(self) -> None:
        if self.headers["Content-Type"] != "application/apply-patch+yaml":
            return self._fail(415, "UnsupportedMediaType")
        return self._keep(urlsplit(self.path).path, self._body(), 200)

    def do_PUT(self) -> None:
        self._keep(urlsplit(self.path).path, self._body(), 200)

    def do_DELETE(self) -> None:
        self._read()
        with self.server.lock:
            if self.server.objects.pop(urlsplit(self.path).path, None) is None:
                return self._fail(404, "NotFound")
            return self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _keep(self, path: str, item: dict[str, Any], status: int) -> None:
        if problems := check_deploy.schema_problems(item):
            return self._fail(422, "Invalid", "; ".join(problems))
        with self.server.lock:
            if status == 201 and path in self.server.objects:
                return self._fail(409, "AlreadyExists")
            self.server.objects[path] = item
            return self._answer(status, item)

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _body(self) -> dict[str, Any]:
        body = self._read()
        return _secret(body[4:]) if body.startswith(b"k8s\0") else dict(yaml.safe_load(body) or {})

    def _fail(self, code: int, reason: str, message: str = "") -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
        self._answer(code, {**status, "message": message or f"{self.command} {self.path}: {reason}"})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Not on stderr."""


def _secret(envelope: bytes) -> dict[str, Any]:
    """Return the Secret, one with a name and labels, in a runtime.Unknown of protobuf, which Go's typed clients send."""
    secret = _fields(_fields(envelope)[2][0])
    metadata = _fields(secret[1][0])
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata[1][0].decode(),
            "labels": {_text(entry, 1): _text(entry, 2) for entry in metadata.get(11, [])},
        },
        "data": {_text(entry, 1): base64.b64encode(_fields(entry)[2][0]).decode() for entry in secret.get(2, [])},
        "type": secret[3][0].decode(),
    }


def _text(message: bytes, number: int) -> str:
    return _fields(message)[number][0].decode()


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """Return the fields of a protobuf message that have a length, by number."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        length, at = _varint(message, at)  # The value itself, if the field is a number.
        if key & 7 == 2:
            found.setdefault(key >> 3, []).append(message[at : at + length])
            at += length
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
