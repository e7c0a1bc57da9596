"""The doctor's checks of gateways: of the one that is named, or of those that the router knows."""

from __future__ import annotations

import ipaddress
import json
import ssl
import urllib.error
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from pointsman.router.v1 import fleet_pb2
from pointsman_cli.doctor_findings import ASKED_AT_ONCE, TIMEOUT_S, Finding, clock, reason_of_request, skew
from pointsman_common.core.addresses import address_of_url, parse_address
from pointsman_common.io.direct_http import open_directly
from pointsman_common.io.tls import TlsSettings, client_context

# Base URL of the gateway of `pointsman up`.
GATEWAY = "http://127.0.0.1:8080"
NAME_ONE = "name one that can be reached from here: --gateway URL"


class Unanswered(Exception):
    """A gateway's /health got no answer that can be read; the message says why."""


def named_gateway(url: str) -> Iterator[Finding]:
    """Yield findings about the gateway with the base URL `url`, which must answer."""
    try:
        yield from _health(url, "gateway", gateway_context())
    except Unanswered as why:
        yield Finding(Finding.FAIL, "gateway", f"{url}: {why}", "check that it runs")


def known_gateways(router: str, replicas: fleet_pb2.ListReplicasResponse | None) -> Iterator[Finding]:
    """Yield findings about the gateways with a session to `router` ("HOST:PORT"), by its answer (None: it gave none); and what
    was not checked. That one of them is not reached from here is no failure, since the router hears of it."""
    if replicas is None:
        yield from _local_gateway(Finding(Finding.WARN, "gateways", "not checked: the router names them", NAME_ONE))
        return
    asked = replicas.this_replica
    if not asked.gateways:
        missing = Finding(
            Finding.FAIL,
            "gateways",
            f"none has a session with {asked.router_id}, so no client is answered",
            "start one, with this router in its --routers; a router for a shadow needs none",
        )
        yield from _local_gateway(missing)
        return
    places = {gateway.gateway_id: place_of(router, gateway) for gateway in replicas.gateways}
    # Processes of one gateway share its address.
    urls = sorted({url for url, _ in places.values() if url})
    if not urls:
        why = next((why for _, why in places.values()), "it does not say where, since its version is older")
        found = f"{asked.gateways} with a session with {asked.router_id}, not checked: {why}"
        yield from _local_gateway(Finding(Finding.WARN, "gateways", found, NAME_ONE))
        return
    trusted = gateway_context()
    # No certificate is for the address at which the router sees a gateway, and nothing secret is sent.
    trusted.check_hostname = False
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        answers = list(threads.map(lambda url: _connected_gateway(url, trusted), urls))
    # Several of them say the same of a model's tokenizer.
    yield from dict.fromkeys(finding for answer in answers for finding in answer)
    for gateway_id, (_, why) in sorted(places.items()):
        if why:
            yield Finding(Finding.WARN, f"gateway {gateway_id}", f"not checked: {why}", NAME_ONE)


def place_of(router: str, gateway: fleet_pb2.Gateway) -> tuple[str, str]:
    """Return the base URL at which a gateway with a session to `router` ("HOST:PORT") can be reached from here, and "";
    or "", and why there is none."""
    try:
        listens = address_of_url(gateway.url)
    except ValueError:
        listens = None
    if listens is None or urlsplit(gateway.url).scheme not in ("http", "https"):
        return "", f"it does not say where it serves; it is at {gateway.address or router}"
    beside_router = not gateway.address or _is_loopback(gateway.address)
    if _is_loopback(listens.host):
        if not beside_router or not _is_loopback(_host(router)):
            return "", f"it serves only on its own machine, {gateway.address if not beside_router else router}"
    elif listens.is_wildcard:
        listens = listens._replace(host=_host(router) if beside_router else gateway.address)
    return f"{urlsplit(gateway.url).scheme}://{listens}", ""


def _host(router: str) -> str:
    try:
        # After the resolver, if there is one: dns:///HOST:PORT.
        return parse_address(router.rpartition("/")[2]).host
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def gateway_context() -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, of which a public gateway's certificate is, and those of
    POINTSMAN_TLS_CA. Raises OSError and ValueError if the file cannot be used."""
    if (ca := TlsSettings().ca) is None:
        return ssl.create_default_context()
    context = client_context(ca)
    context.load_default_certs()
    return context


def _local_gateway(otherwise: Finding) -> Iterator[Finding]:
    """Yield findings about the gateway at GATEWAY, or `otherwise` if none answers there."""
    try:
        yield from _health(GATEWAY, "gateway", gateway_context())
    except Unanswered:
        yield otherwise


def _connected_gateway(url: str, trusted: ssl.SSLContext) -> Iterable[Finding]:
    name = f"gateway {url}"
    try:
        return list(_health(url, name, trusted))
    except Unanswered as why:
        found = f"not checked: it has a session with the router, but does not answer from here: {why}"
        return [Finding(Finding.WARN, name, found, NAME_ONE)]


def _health(url: str, name: str, trusted: ssl.SSLContext) -> Iterator[Finding]:
    """Yield what a gateway says of itself. Raises Unanswered before the first finding."""
    try:
        answer: Any
        try:
            answer = open_directly(f"{url}/health", TIMEOUT_S, trusted)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            status, body, ahead_s = answer.status, json.loads(answer.read() or b"{}"), skew(answer.headers.get("Date"))
    except OSError as error:
        raise Unanswered(reason_of_request(error)) from None
    except (ValueError, HTTPException):
        body = None
    # What is ready and names no models is something else, as an engine, whose /health is empty.
    if not isinstance(body, dict) or (status == 200 and not isinstance(body.get("models"), dict)):
        raise Unanswered("what answers there is no gateway")
    if status != 200:
        yield Finding(Finding.FAIL, name, f"not ready: {json.dumps(body)}", "see what is missing in its /health")
    else:
        yield Finding(Finding.OK, name, "ready")
    if picker := body.get("picker"):
        found = f"proxies ask it on port {picker['port']}; {picker['open_requests']} of their requests are open"
        yield Finding(Finding.OK, "picker", found)
    for model, state in (body.get("models") or {}).items():
        if state.get("exact"):
            yield Finding(Finding.OK, f"tokenizer {model}", "its tokens equal the engine's")
        else:
            yield Finding(
                Finding.WARN,
                f"tokenizer {model}",
                str(state.get("reason", "differs from the engine's")),
                "give the gateway --tokenizers MODEL=FOLDER with the engine's tokenizer.json and chat template",
            )
    yield from clock(name, ahead_s)
