"""What the doctor says of gateways: of the one that is named, and of those that the router knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from pointsman.router.v1 import fleet_pb2
from pointsman_cli import doctor_gateways
from pointsman_cli.doctor_findings import Finding
from pointsman_cli.doctor_gateways import known_gateways, named_gateway, place_of
from tests.support.pages import serving
from tests.support.processes.process import free_port

READY = {"models": {"m": {"exact": True}}}


def gateway(status: int = 200, body: str = json.dumps(READY)) -> AbstractContextManager[str]:
    """A server with a gateway's /health; its context is the base URL."""
    return serving(lambda _: (status, body.encode()))


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """A base URL at which nothing listens, which is also that of the gateway on this machine."""
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(doctor_gateways, "GATEWAY", url)
    return url


def replicas(*known: fleet_pb2.Gateway, count: int | None = None) -> fleet_pb2.ListReplicasResponse:
    gateways = len(known) if count is None else count
    return fleet_pb2.ListReplicasResponse(
        this_replica=fleet_pb2.RouterStatus(router_id="r1", gateways=gateways), gateways=known
    )


def at(url: str, address: str = "127.0.0.1", name: str = "g") -> fleet_pb2.Gateway:
    return fleet_pb2.Gateway(gateway_id=name, url=url, address=address)


def told(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.check) for finding in findings]


ROUTER = "127.0.0.1:50051"
SOUND = [(Finding.OK, "gateway"), (Finding.OK, "tokenizer m")]


@pytest.mark.parametrize(
    ("router", "listens", "address", "expected"),
    [
        ("router:50051", "http://0.0.0.0:8080", "10.0.0.7", "http://10.0.0.7:8080"),
        ("router:50051", "https://[::]:8443", "fd00::7", "https://[fd00::7]:8443"),
        ("router:50051", "http://:8080", "10.0.0.7", "http://10.0.0.7:8080"),
        ("router:50051", "http://10.1.0.7:8080", "10.0.0.7", "http://10.1.0.7:8080"),
        # On the router's machine, or in its process.
        ("router:50051", "http://0.0.0.0:8080", "127.0.0.1", "http://router:8080"),
        ("dns:///router:50051", "http://0.0.0.0:8080", "", "http://router:8080"),
        (ROUTER, "http://127.0.0.1:8080", "127.0.0.1", "http://127.0.0.1:8080"),
        ("localhost:50051", "http://localhost:8080", "", "http://localhost:8080"),
    ],
)
def test_a_gateway_is_asked_where_it_can_be_reached(router: str, listens: str, address: str, expected: str) -> None:
    assert place_of(router, at(listens, address)) == (expected, "")


@pytest.mark.parametrize(
    ("router", "listens", "address", "why"),
    [
        ("router:50051", "http://127.0.0.1:8080", "127.0.0.1", "it serves only on its own machine, router:50051"),
        (ROUTER, "http://127.0.0.1:8080", "10.0.0.7", "it serves only on its own machine, 10.0.0.7"),
        (ROUTER, "", "10.0.0.7", "it does not say where it serves; it is at 10.0.0.7"),
        (ROUTER, "file:///etc/passwd", "10.0.0.7", "it does not say where it serves; it is at 10.0.0.7"),
        (ROUTER, "http://10.0.0.7:port", "10.0.0.7", "it does not say where it serves; it is at 10.0.0.7"),
    ],
)
def test_another_gateway_is_not_taken_for_one_that_cannot_be_reached(
    router: str, listens: str, address: str, why: str
) -> None:
    assert place_of(router, at(listens, address)) == ("", why)


def test_a_named_gateway_must_answer(nowhere: str) -> None:
    with gateway() as url:
        assert told(named_gateway(url)) == SOUND
    assert told(named_gateway(nowhere)) == [(Finding.FAIL, "gateway")]


# An engine's /health is empty, and a router's and an agent's have no models.
@pytest.mark.parametrize("body", ["<html>", "", '{"router_id": "r1", "ready": true}', '{"models": [], "engines": []}'])
def test_what_answers_like_no_gateway_is_not_called_ready(body: str) -> None:
    with gateway(body=body) as url:
        [finding] = named_gateway(url)
        assert (finding.level, finding.found) == (Finding.FAIL, f"{url}: what answers there is no gateway")


def test_each_gateway_that_the_router_knows_is_asked_once() -> None:
    with gateway() as one, gateway(503, "{}") as two:
        known = (at(one, name="a-0"), at(one, name="a-1"), at(two, name="b"))
        assert sorted(told(known_gateways(ROUTER, replicas(*known)))) == sorted(
            [(Finding.OK, f"gateway {one}"), (Finding.OK, "tokenizer m"), (Finding.FAIL, f"gateway {two}")]
        )


def test_a_gateway_that_the_router_hears_of_and_that_is_not_reached_is_not_a_failure(nowhere: str) -> None:
    with gateway() as url:
        known = (at(url, name="a"), at(nowhere, name="b"), at("http://127.0.0.1:8080", "10.0.0.7", name="c"))
        found = {finding.check: finding for finding in known_gateways(ROUTER, replicas(*known))}
    assert found[f"gateway {url}"].level == Finding.OK
    missed, elsewhere = found[f"gateway {nowhere}"], found["gateway c"]
    assert (missed.level, elsewhere.level) == (Finding.WARN, Finding.WARN)
    assert missed.found.startswith("not checked: it has a session with the router, but does not answer from here: ")
    assert elsewhere.found == "not checked: it serves only on its own machine, 10.0.0.7"


def test_what_is_not_known_of_gateways_is_told_as_not_checked() -> None:
    [unasked] = known_gateways(ROUTER, None)
    assert (unasked.level, unasked.found) == (Finding.WARN, "not checked: the router names them")
    # A router of an earlier version only counts them, and gateways of an earlier version only connect.
    for answer in (replicas(count=2), replicas(at("", "10.0.0.7"), at("", "10.0.0.8", name="h"))):
        [older] = known_gateways(ROUTER, answer)
        assert older.level == Finding.WARN
        assert older.found.startswith("2 with a session with r1, not checked: it does not say where")


def test_a_router_without_gateways_answers_no_client() -> None:
    [finding] = known_gateways(ROUTER, replicas())
    assert (finding.level, finding.check) == (Finding.FAIL, "gateways")


@pytest.mark.parametrize("answer", [None, replicas(), replicas(count=1)])
def test_a_gateway_on_this_machine_is_asked_if_the_router_names_none(
    monkeypatch: pytest.MonkeyPatch, answer: fleet_pb2.ListReplicasResponse | None
) -> None:
    with gateway() as url:
        monkeypatch.setattr(doctor_gateways, "GATEWAY", url)
        assert told(known_gateways(ROUTER, answer)) == SOUND
