"""Routers and gateways as a user gives them, and what is said if they cannot be reached."""

from __future__ import annotations

import http.server
import socket
import threading

import pytest
import typer
from typer.testing import CliRunner

from pointsman_cli import fleet_commands
from pointsman_cli.router_call import router_of, url_of
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


def test_a_gateway_is_a_url_or_an_address() -> None:
    assert [url_of("127.0.0.1:8080"), url_of("https://g/")] == ["http://127.0.0.1:8080", "https://g"]


@pytest.mark.parametrize("listens", [False, True])
def test_a_router_that_is_not_there_is_one_sentence(listens: bool) -> None:
    """And so is another server at its address."""

    class Silent(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        router = f"127.0.0.1:{server.server_port if listens else free_port()}"
        app = typer.Typer()
        fleet_commands.add_fleet_commands(app)
        done = CliRunner().invoke(app, ["instances", "--router", router])
        server.shutdown()
        thread.join()
    said = "what listens there is no router" if listens else "nothing listens there"
    assert done.output.startswith(f"pointsman: router {router} cannot be reached: {said}")
    assert done.output.count("\n") == 1
