"""Stored responses on two real engines, one of which restarts: the right engine answers, or the error says what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.test_continued_answers import killed, whole_again
from tests.support.engines.servers import SERVED_NAME, Engine, EngineSpec, running_engines
from tests.support.http_request import Reply, ask
from tests.support.instances import IN_STEP
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

FINE, LOST, NEVER_STORED, DRAINED = (200, ""), (404, "response_lost"), (404, "not_found"), (503, "response_unavailable")
BODY: dict[str, Any] = {"model": SERVED_NAME, "input": "one two three", "max_output_tokens": 20, "temperature": 0}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "streamed": {"stream": True},
    "background": {"background": True},
    "streamed in the background": {"background": True, "stream": True},
}


@pytest.fixture(scope="module")
def engines(model_folder: Any, site: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Two engines with the connector package."""
    specs = [EngineSpec(name, env={"PYTHONPATH": str(site)}) for name in ("a", "b")]
    with running_engines(specs, model_folder, tmp_path_factory.mktemp("storing")) as started:
        yield started


@pytest.fixture(scope="module")
def fleet(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with a gateway of two processes."""
    folder = tmp_path_factory.mktemp("plane")
    with ControlPlane(engines, folder, gateway_flags={"--processes": 2}).running() as plane:
        yield plane


@pytest.fixture(scope="module")
def gateways(fleet: ControlPlane) -> Iterator[list[str]]:
    """The URLs of that gateway and of another one."""
    with fleet.another_gateway("other") as url:
        yield [fleet.gateway_url, url]


def outcome(reply: Reply) -> tuple[int, str]:
    """Return an answer's status and its error's code, "" if it is none."""
    if reply.status == 200:
        assert '"error":{' not in reply.text
        return FINE
    error = reply.json()["error"]
    assert error["type"] in ("invalid_request_error", "server_error")
    return reply.status, str(error["code"])


def first_data(reply: Reply) -> dict[str, Any]:
    """Return the response that an answer describes, or that its first event does."""
    if not reply.text.startswith("event"):
        return dict(reply.json())
    line = next(line for line in reply.text.splitlines() if line.startswith("data: "))
    return dict(json.loads(line[6:])["response"])


def made_at(fleet: ControlPlane, engine: Engine, **more: Any) -> str:
    """Have an engine store a response; return its id."""
    with fleet.draining(*(other for other in fleet.engines if other is not engine)):
        reply = ask(f"{fleet.gateway_url}/v1/responses", BODY | more)
    assert reply.status == 200
    id_ = str(first_data(reply)["id"])
    until(lambda: ask(f"{engine.url}/v1/responses/{id_}").status == 200, within_s=30, what="the response stored")
    return id_


def read(gateways: list[str], id_: str) -> set[tuple[int, str]]:
    """Read a response several times at each gateway, so that each of its processes is asked."""
    return {outcome(ask(f"{url}/v1/responses/{id_}")) for url in gateways for _ in range(4)}


def continued(gateways: list[str], id_: str) -> set[tuple[int, str]]:
    """Continue a response at each gateway in each way."""
    asked = [BODY | {"input": "go on", "previous_response_id": id_} | more for more in KINDS.values()]
    return {outcome(ask(f"{url}/v1/responses", body)) for url in gateways for body in asked}


def settle(gateways: list[str], id_: str, expected: tuple[int, str]) -> None:
    """Wait until all that is asked about a response has this outcome. Each process of a gateway learns of an engine's restart at
    its own time, and that the engine gets requests again; before, the engine is one that never had the response."""
    asks = (read, cancelled, continued)
    until(lambda: all(what(gateways, id_) == {expected} for what in asks), within_s=60, what=str(expected))


def cancelled(gateways: list[str], id_: str) -> set[tuple[int, str]]:
    return {outcome(ask(f"{url}/v1/responses/{id_}/cancel", b"")) for url in gateways}


def ended(fleet: ControlPlane, id_: str) -> str:
    """Wait until a background response has ended; return its status."""
    status = ""

    def over() -> bool:
        nonlocal status
        status = ask(f"{fleet.gateway_url}/v1/responses/{id_}").json()["status"]
        return status not in ("queued", "in_progress")

    until(over, within_s=60, what="the response's end")
    return status


def test_each_engine_keeps_its_own_over_the_other_s_restart(fleet: ControlPlane, gateways: list[str]) -> None:
    gone, stays = fleet.engines
    lost = [made_at(fleet, gone, **more) for more in KINDS.values()]
    kept = [made_at(fleet, stays, **more) for more in KINDS.values()]
    for id_ in lost + kept:
        assert read(gateways, id_) == continued(gateways, id_) == {FINE}
        assert cancelled(gateways, id_) == {(400, "400")}, "it has ended"
    running = made_at(fleet, gone, background=True, max_output_tokens=3_000, ignore_eos=True)
    never = made_at(fleet, stays)[:-1] + "x"
    killed(fleet, gone)
    until(lambda: gone.instance_id not in ready(fleet), within_s=60, what="the dead engine noticed")
    for id_ in [*lost, running]:
        for what in (read, cancelled, continued):
            # Its engine may be back at once, or never.
            assert what(gateways, id_) <= {LOST, DRAINED, (502, "instance_failed")}
    for id_ in kept:
        assert read(gateways, id_) == continued(gateways, id_) == {FINE}
    whole_again(fleet)
    for id_ in [*lost, running]:
        settle(gateways, id_, LOST)
    for id_ in [*kept, made_at(fleet, gone)]:
        assert read(gateways, id_) == continued(gateways, id_) == {FINE}
    assert read(gateways, never) == cancelled(gateways, never) == continued(gateways, never) == {NEVER_STORED}
    assert read(gateways, made_unstored(fleet)) == {NEVER_STORED}
    fleet.wait_idle()


def ready(fleet: ControlPlane) -> set[str]:
    return {name for name, status in fleet.instances().items() if status.state in IN_STEP}


def made_unstored(fleet: ControlPlane) -> str:
    return str(first_data(ask(f"{fleet.gateway_url}/v1/responses", BODY | {"store": False}))["id"])


def test_a_background_response_is_cancelled_and_read_as_a_stream_at_any_gateway(
    fleet: ControlPlane, gateways: list[str]
) -> None:
    for engine in fleet.engines:
        running = made_at(fleet, engine, background=True, max_output_tokens=3_000, ignore_eos=True)
        assert ask(f"{gateways[1]}/v1/responses/{running}/cancel", b"").json()["status"] == "cancelled"
        assert ended(fleet, running) == "cancelled"
        streamed = made_at(fleet, engine, background=True, stream=True)
        texts = {ask(f"{url}/v1/responses/{streamed}?stream=true").text for url in gateways}
        assert len(texts) == 1
        assert "event: response.completed" in texts.pop()
    fleet.wait_idle()


def test_a_drained_engine_s_responses_are_read_and_cancelled_and_not_continued(
    fleet: ControlPlane, gateways: list[str]
) -> None:
    engine = fleet.engines[0]
    id_ = made_at(fleet, engine)
    running = made_at(fleet, engine, background=True, max_output_tokens=3_000, ignore_eos=True)
    with fleet.draining(engine):
        until(lambda: continued(gateways, id_) == {DRAINED}, within_s=30, what="the drain known")
        assert read(gateways, id_) == {FINE}
        assert ask(f"{gateways[0]}/v1/responses/{running}/cancel", b"").json()["status"] == "cancelled"
    until(lambda: continued(gateways, id_) == {FINE}, within_s=30, what="the drain's end known")
    fleet.wait_idle()


@pytest.mark.parametrize("how", ["killed", "emptied"])
def test_a_response_that_went_on_elsewhere_is_not_stored(fleet: ControlPlane, gateways: list[str], how: str) -> None:
    with fleet.client() as client:
        raw = client.responses.with_raw_response.create(
            model=SERVED_NAME,
            input="nine ten",
            stream=True,
            extra_body={"ignore_eos": True},
            max_output_tokens=2_000,
            temperature=0,
        )
        engine = next(member for member in fleet.engines if member.instance_id == raw.headers["x-pointsman-instance"])
        for number, event in enumerate(raw.parse()):
            if number == 10 and how == "killed":
                killed(fleet, engine)
            elif number == 10:
                fleet.drain(engine, move=True)
            if event.type == "response.created":
                created = event.response.id
    assert event.type == "response.completed"
    assert event.response.id == created
    other = next(member for member in fleet.engines if member is not engine)
    assert ask(f"{other.url}/v1/responses/{created}").status == 404, "no engine keeps what nobody could find"
    if how == "killed":
        whole_again(fleet)
    else:
        fleet.drain(engine, resume=True)
    settle(gateways, created, LOST if how == "killed" else NEVER_STORED)
    fleet.wait_idle()
