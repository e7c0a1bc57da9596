"""Routers and gateways as a user gives them, and what is said if they cannot be reached."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pointsman_cli import fleet_commands
from pointsman_cli.router_call import router_of, url_of
from tests.support.pages import serving
from tests.support.processes.process import free_port


@pytest.mark.parametrize(
    ("given", "router"),
    [
        ("localhost", "localhost:50051"),
        ("10.0.0.7:5", "10.0.0.7:5"),
        ("http://r:50051", "r:50051"),
        ("https://r/", "r:50051"),
        ("[::1]:7", "[::1]:7"),
        ("[::1]", "[::1]:50051"),
        ("dns:///r:50051", "dns:///r:50051"),
        ("unix:/run/router.sock", "unix:/run/router.sock"),
        ("unix:router.sock", "unix:router.sock"),
        ("unix-abstract:router", "unix-abstract:router"),
        ("ipv4:10.0.0.7:50051,10.0.0.8:50051", "ipv4:10.0.0.7:50051,10.0.0.8:50051"),
        ("ipv6:[::1]:50051,[::2]:50051", "ipv6:[::1]:50051,[::2]:50051"),
        ("unix:50051", "unix:50051"),
    ],
)
def test_a_router_is_given_in_several_forms(given: str, router: str) -> None:
    assert router_of(given) == router


def test_of_several_routers_the_first_that_can_be_reached_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        assert router_of(f"127.0.0.1:{free_port()}, {there}") == there
    gone = f"127.0.0.1:{free_port()}"
    assert router_of(f"{gone},127.0.0.1:{free_port()}") == gone


def test_one_of_several_may_be_a_socket_s_file(tmp_path: Path) -> None:
    gone = f"127.0.0.1:{free_port()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "router"))
        assert router_of(f"{gone},unix://{tmp_path}/none,unix:{tmp_path}/router") == gone
        server.listen()
        for form in ("unix:", "unix://"):
            assert router_of(f"{gone},unix:{tmp_path}/none,{form}{tmp_path}/router") == f"{form}{tmp_path}/router"
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        there = f"dns:///127.0.0.1:{tcp.getsockname()[1]}"
        assert router_of(f"{gone},{there}") == there


@pytest.mark.parametrize("command", [["what-if", "--policy", "sticky"], ["set-policy", "sticky"], ["instances"]])
def test_every_command_takes_the_same_forms(command: list[str], tmp_path: Path) -> None:
    app = typer.Typer()
    fleet_commands.add_fleet_commands(app)
    for given, router in (
        (f"unix:{tmp_path}/none", f"unix:{tmp_path}/none"),
        (f"http://127.0.0.1:{(port := free_port())}", f"127.0.0.1:{port}"),
        (f"ipv4:127.0.0.1:{port},127.0.0.1:{port}", f"ipv4:127.0.0.1:{port},127.0.0.1:{port}"),
    ):
        done = CliRunner().invoke(app, [*command, "--router", given])
        assert done.output.startswith(f"pointsman: router {router} cannot be reached: "), done.output


def test_a_gateway_is_a_url_or_an_address() -> None:
    given = ["127.0.0.1:8080", "https://g/", "https://g/v1", "https://g/proxied/v1/"]
    assert list(map(url_of, given)) == ["http://127.0.0.1:8080", "https://g", "https://g", "https://g/proxied"]
    for wrong in ("http://h/\u00fc", "h:x", "http://h/a b"):
        with pytest.raises(typer.BadParameter):
            url_of(wrong)


@pytest.mark.parametrize("listens", [False, True])
def test_a_router_that_is_not_there_is_one_sentence(listens: bool) -> None:
    """And so is another server at its address."""

    with serving(lambda _: (404, b"")) as url:
        router = url.removeprefix("http://") if listens else f"127.0.0.1:{free_port()}"
        app = typer.Typer()
        fleet_commands.add_fleet_commands(app)
        done = CliRunner().invoke(app, ["instances", "--router", router])
    remedy = "start it, or name another one with --router HOST:PORT"
    said = "what listens there is no router" if listens else f"nothing listens there: {remedy}"
    assert done.output.startswith(f"pointsman: router {router} cannot be reached: {said}")
    assert done.output.count("\n") == 1
