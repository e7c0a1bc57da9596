"""Refusals that clients see as their own errors; the router answers from a shell. Bad input: test_as_vllm.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.chat_client import chat, fresh_words, user
from tests.support.engines.servers import Engine
from tests.support.http_request import ask
from tests.support.processes.control_plane import ControlPlane

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_a_body_over_the_limit_is_refused(plane: ControlPlane) -> None:
    answer = ask(plane.gateway_url + "/v1/chat/completions", b" " * (33 << 20))
    assert (answer.status, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/collective_rpc", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("POST", "/inference/v1/generate", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
    ],
)
def test_other_paths_and_methods_stay_closed(plane: ControlPlane, method: str, path: str, status: int) -> None:
    answer = ask(plane.gateway_url + path, {} if method == "POST" else None, method=method)
    assert answer.status == status, answer.text
    assert answer.json()["error"]["message"]


def test_the_official_client_sees_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as negative:
        chat(client, [user("hi")], max_tokens=-1)
    assert negative.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, [user(fresh_words(4_200))])
    assert long.value.code == "context_length_exceeded"


def test_no_instance_is_said_with_a_time_to_try_again(
    client: openai.OpenAI, plane: ControlPlane, engines: list[Engine]
) -> None:
    with plane.draining(*engines), pytest.raises(openai.InternalServerError) as refused:
        chat(client, [user("hi")], max_tokens=1)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["Retry-After"]) > 0
    assert chat(client, [user("hi")], max_tokens=1).finish_reason == "length"


def test_what_only_the_engine_refuses_is_passed_on_and_released(
    client: openai.OpenAI, plane: ControlPlane, engines: list[Engine]
) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, [user(fresh_words(40))], extra_body={"structured_outputs": {"regex": "("}})
    plane.wait_idle()
    assert plane.finished_decision(plane.newest_decision().decision_id).outcome == fleet_pb2.DECISION_OUTCOME_REJECTED
    assert all(engine.healthy() for engine in engines)


def test_reflection_lists_the_services_and_answers_calls(plane: ControlPlane, engines: list[Engine]) -> None:
    """What the README tells people to type, with buf instead of grpcurl."""
    services = _buf_curl(plane, "--list-services", f"http://{plane.router_address}").split()
    assert {
        "pointsman.agent.v1.AgentService",
        "pointsman.router.v1.PlacementService",
        "pointsman.router.v1.FleetService",
        "grpc.health.v1.Health",
    } <= set(services)
    url = f"http://{plane.router_address}/pointsman.router.v1.FleetService/ListInstances"
    listed = json.loads(_buf_curl(plane, url))["instances"]
    assert {status["instance"]["instanceId"] for status in listed} == {engine.instance_id for engine in engines}
    assert {status["state"] for status in listed} == {"INSTANCE_STATE_READY"}


def test_the_router_refuses_callers_without_a_token(plane: ControlPlane) -> None:
    url = f"http://{plane.router_address}/pointsman.router.v1.FleetService/ListInstances"
    with pytest.raises(subprocess.CalledProcessError) as refused:
        _buf_curl(plane, url, token="wrong")
    assert "unauthenticated" in refused.value.stderr


def _buf_curl(plane: ControlPlane, *arguments: str, token: str | None = None) -> str:
    buf = Path(sys.executable).with_name("buf")
    authorization = f"authorization: Bearer {token or plane.tokens['operator']}"
    command = [str(buf), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-H", authorization, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
