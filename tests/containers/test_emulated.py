"""The profiles `emulated` and `telemetry`: clients, rights, ports, logs, stops, kills, recreation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.support.containers.clients import load, vendors
from tests.support.containers.compose import Project
from tests.support.containers.scrapes import all_are_scraped
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)
URL = "http://127.0.0.1:8080"
OWN = ("router", "gateway", "agent-emulated", "emulated-0", "emulated-1")
SERVICES = ("redis", *OWN)
USERS = {"redis": "999", "prometheus": "65534"} | dict.fromkeys(OWN, "10001")


@pytest.fixture(scope="module")
def up(project: Project) -> Iterator[Project]:
    """The running services."""
    project.configure(COMPOSE_PROFILES="emulated,telemetry")
    project.start()
    yield project
    project.compose("down", "--volumes", "--timeout=10")


@pytest.fixture
def whole(up: Project) -> Project:
    """The running services, all healthy."""
    if len(up.host.docker("ps", "--quiet", "--filter", "health=healthy").split()) < len(USERS):
        up.start()
    return up


def test_clients_of_both_vendors_are_answered_at_the_published_port(whole: Project) -> None:
    answers = vendors(whole.host, URL, whole.key)
    assert set(answers) == {"openai", "openai stream", "anthropic", "anthropic stream"}
    for name, (text, end) in answers.items():
        assert (len(text.split()), end) == (8, "length" if "openai" in name else "max_tokens"), name


def test_services_run_without_the_rights_of_root(whole: Project) -> None:
    for service, user in USERS.items():
        found = whole.inspect(service)
        assert found["HostConfig"]["ReadonlyRootfs"], service
        status = _status(whole, service)
        assert status["Uid"].split() == [user] * 4, service
        assert {status[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {""}, service
        assert status["NoNewPrivs"] == "1", service


def _status(project: Project, service: str) -> dict[str, str]:
    """Return the kernel's lines of the first process of a service's container."""
    pid = project.inspect(service)["State"]["Pid"]
    lines = project.host.run("cat", f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_services_write_only_where_they_are_given_a_volume(whole: Project) -> None:
    writing = ("router", "gateway", "agent-emulated")
    folders = ("/", "/opt/pointsman", "/run/secrets", "/models", "/var/lib/pointsman")
    tried = f"for folder in {' '.join(folders)}; do touch $folder/x 2>/dev/null && echo $folder; done; true"
    for service in OWN:
        accepted = whole.compose("exec", service, "sh", "-c", tried).split()
        assert accepted == (["/var/lib/pointsman"] if service in writing else []), service


def test_only_gateway_router_and_prometheus_have_ports_and_only_on_loopback(whole: Project) -> None:
    ports = {service: whole.inspect(service)["NetworkSettings"]["Ports"] for service in USERS}
    published = {
        (service, bound["HostIp"], bound["HostPort"])
        for service, all_ports in ports.items()
        for bounds in all_ports.values()
        for bound in bounds or []
    }
    assert published == {
        ("gateway", "127.0.0.1", "8080"),
        ("router", "127.0.0.1", "50051"),
        ("prometheus", "127.0.0.1", "9090"),
    }
    # Redis and the engines are on networks that the others are not on.
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
    for service, host, port in (("gateway", "redis", "6379"), ("router", "emulated-0", "8000")):
        tried = whole.compose("exec", service, "sh", "-c", f"python -c '{reach}' {host} {port} 2>&1 || true")
        assert "gaierror" in tried, (service, tried)


def test_each_container_has_only_its_secrets(whole: Project) -> None:
    mounted = {
        service: sorted(whole.compose("exec", service, "ls", "/run/secrets", check=False).split()) for service in USERS
    }
    assert mounted == {
        "redis": ["redis-users.acl"],
        "prometheus": [],
        "router": ["agent", "gateway", "observer", "operator", "redis-url"],
        "gateway": ["api-keys", "gateway"],
        "agent-emulated": ["agent"],
        "emulated-0": [],
        "emulated-1": [],
    }
    secrets = _secrets(whole)
    for service in USERS:
        # What `docker inspect` tells: environment, command, labels.
        told = json.dumps(whole.inspect(service))
        assert not [secret for secret in secrets if secret in told], service


def _secrets(project: Project) -> list[str]:
    names = ("agent", "gateway", "operator", "observer", "redis-password")
    return [*(project.secret(name) for name in names), project.key]


def test_logs_are_json_without_secrets_and_without_errors(whole: Project) -> None:
    secrets = _secrets(whole)
    for service in USERS:
        kept = whole.inspect(service)["HostConfig"]["LogConfig"]
        assert kept == {"Type": "json-file", "Config": {"max-file": "5", "max-size": "20m"}}, service
        assert not [line for line in whole.logs(service) for secret in secrets if secret in line], service
    for service in OWN:
        lines = whole.logs(service)
        assert lines, service
        if service.startswith("emulated"):
            lines.remove("emulated engine http://127.0.0.1:8000")
            assert json.loads(lines[0])["listen"] == "0.0.0.0:8000"
        assert not [line for line in lines if not line.startswith("{")], service
        assert not [line for line in lines if json.loads(line)["level"] in ("warning", "error")], service


def test_prometheus_scrapes_every_service_and_has_the_rules(whole: Project) -> None:
    all_are_scraped(whole.host)


def test_operators_commands_find_the_fleet_from_the_routers_container(whole: Project) -> None:
    listed = whole.compose("exec", "router", "pointsman", "instances")
    assert listed.count("READY") == 2 or listed.count("ready") == 2, listed
    found = whole.compose("exec", "router", "sh", "-c", "pointsman doctor 2>&1; echo status $?")
    assert found.endswith("status 0\n"), found
    assert re.search(r"ok +gateway http://\S+:8080 +ready", found), found
    assert found.count("its tokens equal the engine's") == 1, found


@pytest.mark.parametrize("service", ["gateway", "router", "agent-emulated", "emulated-0", "redis"])
def test_a_stop_lets_the_streams_end(whole: Project, service: str) -> None:
    with load(whole.host, URL, whole.key) as streams:
        streams.answers(4)
        seen_lines = len(whole.logs("gateway"))
        whole.compose("stop", service)
        assert whole.inspect(service)["State"]["ExitCode"] == 0
        warned = [line for line in whole.logs("gateway")[seen_lines:] if json.loads(line)["level"] != "info"]
        whole.compose("start", service)
        streams.answers(8)
    assert not streams.failed
    assert not streams.put_off
    assert not streams.refused or service == "gateway"
    assert not warned or service in ("router", "emulated-0"), warned


@pytest.mark.parametrize("service", ["router", "agent-emulated", "emulated-0", "redis"])
def test_what_crashes_is_started_again_and_no_stream_is_lost(whole: Project, service: str) -> None:
    started = whole.inspect(service)["State"]["StartedAt"]
    with load(whole.host, URL, whole.key) as streams:
        streams.answers(4)
        whole.crash(service)
        until(lambda: _healthy_since(whole, service) > started, within_s=120, what=f"{service} again")
        streams.answers(8)
    assert not streams.failed
    assert not streams.put_off
    assert not streams.refused


def test_a_gateway_that_crashes_is_started_again(whole: Project) -> None:
    started = whole.inspect("gateway")["State"]["StartedAt"]
    with load(whole.host, URL, whole.key) as streams:
        streams.answers(4)
        whole.crash("gateway")
        until(lambda: _healthy_since(whole, "gateway") > started, within_s=120, what="the gateway again")
        streams.answers(8)
    # Its own streams break, and nothing else.
    assert not streams.put_off
    assert len(streams.failed) <= 4
    assert not [failure for failure in streams.failed if not failure.startswith("200 Client")]


def _healthy_since(project: Project, service: str) -> str:
    """Return the time of a service's last start; "" while it is not healthy."""
    state = project.inspect(service)["State"]
    return str(state["StartedAt"]) if state.get("Health", {}).get("Status") == "healthy" else ""


def test_streams_go_on_for_as_long_as_an_agent_is_killed(whole: Project) -> None:
    with load(whole.host, URL, whole.key) as streams:
        streams.answers(4)
        whole.compose("kill", "agent-emulated")
        # 60 streams are some 30 s, and engines without an agent were lost after 12.
        streams.answers(60)
        whole.start()
        streams.answers(8)
    assert not streams.failed
    assert not streams.put_off
    assert not streams.refused


def test_all_are_killed_and_come_up_again(whole: Project) -> None:
    whole.compose("exec", "router", "pointsman", "cordon", "emulated-1:8000", "--reason", "kept")
    written = ("exec", "redis", "sh", "-c", "grep --recursive --count --text kept /data || true")
    until(lambda: bool(re.search(r":[1-9]", whole.compose(*written))), within_s=30, what="the order in Redis' file")
    whole.compose("kill")
    whole.start()
    listed = json.loads(whole.compose("exec", "router", "pointsman", "instances", "--json"))
    reasons = {status["instance"]["instance_id"]: status.get("cordon_reason", "") for status in listed["instances"]}
    assert reasons == {"emulated-0:8000": "", "emulated-1:8000": "kept"}
    whole.compose("exec", "router", "pointsman", "uncordon", "emulated-1:8000")
    assert set(vendors(whole.host, URL, whole.key)) == {"openai", "openai stream", "anthropic", "anthropic stream"}


def test_recreation_one_by_one_loses_no_stream_and_keeps_the_volumes(whole: Project) -> None:
    kept = {service: _files(whole, service) for service in ("router", "gateway", "agent-emulated")}
    with load(whole.host, URL, whole.key) as streams:
        streams.answers(4)
        for service in SERVICES:
            before = whole.inspect(service)["Id"]
            whole.compose("up", "--detach", "--wait", "--no-deps", "--force-recreate", service)
            assert whole.inspect(service)["Id"] != before
            streams.answers(8)
    assert not streams.failed
    assert not streams.put_off
    for service, files in kept.items():
        assert files <= _files(whole, service), service


def _files(project: Project, service: str) -> set[str]:
    return set(project.compose("exec", service, "find", "/var/lib/pointsman", "-type", "d").split())
