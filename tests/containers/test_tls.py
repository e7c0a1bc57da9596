"""The profile `emulated` with tls.yaml."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.containers.clients import load, vendors
from tests.support.containers.compose import Project
from tests.support.containers.scrapes import all_are_scraped

pytestmark = pytest.mark.timeout(900)
URL = "https://127.0.0.1:8080"
# Asks a server for its certificate and completes no more than the handshake; 0 if the server accepts this client.
SHAKE = (
    "import socket, ssl, sys; context = ssl.create_default_context(cafile='/run/tls/ca.pem');"
    "{more} stream = context.wrap_socket(socket.create_connection(('{host}', {port}), 5), server_hostname='{host}');"
    "stream.sendall(b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n'); print(bool(stream.recv(1)))"
)


@pytest.fixture(scope="module")
def up(project: Project) -> Iterator[Project]:
    """The running services."""
    project.configure(COMPOSE_PROFILES="emulated,telemetry", COMPOSE_FILE="compose.yaml:tls.yaml")
    project.start()
    yield project
    project.compose("down", "--volumes", "--timeout=10")


@pytest.fixture
def authority(up: Project) -> str:
    """The path of the authority's certificate on this machine."""
    return str(up.host.root / up.folder.lstrip("/") / "tls/authority/ca.pem")


def test_clients_that_trust_the_authority_are_answered(up: Project, authority: str) -> None:
    answers = vendors(up.host, URL, up.key, SSL_CERT_FILE=authority)
    assert {len(text.split()) for text, _ in answers.values()} == {8}
    with load(up.host, URL, up.key, SSL_CERT_FILE=authority) as streams:
        streams.answers(8)
    assert not streams.failed
    assert not streams.refused


def test_others_are_refused(up: Project) -> None:
    with pytest.raises(AssertionError):
        vendors(up.host, URL.replace("https", "http"), up.key)
    with pytest.raises(AssertionError):
        vendors(up.host, URL, up.key)


def test_the_router_wants_a_certificate_of_its_clients(up: Project) -> None:
    own = "context.load_cert_chain('/run/tls/cert.pem', '/run/tls/key.pem'); context.set_alpn_protocols(['h2']);"
    for more, accepted in ((own, True), ("context.set_alpn_protocols(['h2']);", False)):
        script = SHAKE.format(host="router", port=50051, more=more)
        assert (up.compose("exec", "gateway", "python", "-c", script, check=False) == "True\n") is accepted


def test_operators_commands_work_in_the_routers_container(up: Project) -> None:
    listed = up.compose("exec", "router", "pointsman", "instances")
    assert listed.count("READY") == 2, listed
    for flags in ("", "--gateway https://gateway:8080"):
        found = up.compose("exec", "router", "sh", "-c", f"pointsman doctor {flags} 2>&1; echo status $?")
        assert found.endswith("status 0\n"), found
        assert found.count("its tokens equal the engine's") == 1, found


def test_redis_speaks_nothing_but_tls(up: Project) -> None:
    tried = up.compose("exec", "redis", "redis-cli", "-e", "ping", check=False)
    assert "PONG" not in tried
    pong = up.compose("exec", "redis", "redis-cli", "-e", "--tls", "--cacert", "/run/tls/ca.pem", "ping")
    assert pong == "PONG\n"


def test_prometheus_scrapes_the_gateway_by_tls(up: Project) -> None:
    all_are_scraped(up.host)
