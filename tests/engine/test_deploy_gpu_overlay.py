"""The workloads of the overlay `gpu`, started as processes with a real vLLM: the openai client with an address and a key gets
tool calls and the predicted prefix cache hits, prompts may reach the model's limit, and rollouts lose nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_common.io.auth import bearer
from pointsman_common.io.channel import CHANNEL_OPTIONS
from tests.support.engines.chat_client import ONE_MESSAGE, assistant, fresh_words, user
from tests.support.engines.servers import ENGINE_PYTHON, core_paused, held_pieces, make_model
from tests.support.http_request import ask, serves
from tests.support.processes.kubernetes_pods import Cluster, Pod
from tests.support.processes.process import Process, free_port
from tests.support.repository import REPOSITORY
from tests.support.tcp_proxies import Link
from tests.support.waiting import eventually, until
from tools import check_deploy
from tools.check_deploy import DEPLOY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# The one setting that differs: a context that a CPU computes in seconds.
CONTEXT = 4_096
WITHIN_S = 240.0
# Strict: without it vLLM does not constrain the arguments, and a random model may write them without end.
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("measure", "convert")
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A ready pod of each workload; of four instances only one. The hub has the tests' model under the deployed one's name."""
    assert ENGINE_PYTHON.exists(), f"{ENGINE_PYTHON} is missing: `make test` makes it"
    folder = tmp_path_factory.mktemp("gpu")
    model = make_model(folder / "model", maker="coder_model.py")
    settings = "k8s/components/settings/engine.env"
    settings_text, changed = re.subn(
        "(?m)^MAX_MODEL_LEN=.*", f"MAX_MODEL_LEN={CONTEXT}", (DEPLOY / settings).read_text()
    )
    assert changed == 1
    cluster_objects = check_deploy.render(DEPLOY / "k8s/overlays/gpu", files={settings: settings_text})
    port = free_port()
    cluster = Cluster(cluster_objects, folder, f"http://127.0.0.1:{port}")
    name = (cluster.data("ConfigMap", "engine") or {})["MODEL"]
    argv = [sys.executable, "-m", "tests.support.fakes.hub", str(port), name, str(model)]
    hub = Process("hub", argv, folder / "hub.log", cwd=REPOSITORY)
    try:
        hub.start()
        hub.wait_ready(lambda: serves(cluster.hub, f"/api/models/{name}"), within_s=WITHIN_S)
        pods = [cluster.add(workload, f"{workload}-0") for workload in ("redis", "router", "vllm", "gateway")]
        # The pod that replaces the gateway in a rollout.
        cluster.add("gateway", "gateway-1").prepare()
        for pod in pods:
            pod.start()
            if pod is pods[0]:
                pod.wait_ready()
        for pod in pods:
            pod.wait_ready()
        yield cluster
    finally:
        cluster.stop()
        if hub.alive:
            hub.kill()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    """A client as somebody creates it who was given an address and a key."""
    arguments = _client_arguments(cluster, _gateway(cluster).url("http"))
    # Without this machine's proxies.
    with openai.DefaultHttpxClient(trust_env=False) as http, openai.OpenAI(**arguments, http_client=http) as client:
        yield client


def _client_arguments(cluster: Cluster, url: str) -> dict[str, Any]:
    return {"base_url": f"{url}/v1", "api_key": cluster.secret("api-keys", "api-keys").strip().partition(":")[2]}


def _served(client: openai.OpenAI) -> str:
    [model] = client.models.list().data
    return model.id


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_is_named_is_called(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": _served(client),
        "messages": [user(fresh_words(20))],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "convert"}},
        "max_tokens": 400,
    }
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
        parts = [call.function for chunk in chunks for call in chunk.delta.tool_calls or [] if call.function]
        names, arguments = [part.name for part in parts if part.name], "".join(part.arguments or "" for part in parts)
        ended = chunks[-1].finish_reason
    else:
        [choice] = client.chat.completions.create(**asked).choices
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        names, arguments, ended = [call.function.name], call.function.arguments, choice.finish_reason
    # If the client, not the model, chose the call, the finish reason is "stop".
    assert (names, ended) == (["convert"], "stop")
    # A random model may write any number of blanks after it.
    assert json.loads(arguments)["unit"].strip() in ("celsius", "fahrenheit")


def test_a_second_turn_is_cached_as_predicted(cluster: Cluster, client: openai.OpenAI) -> None:
    until(lambda: _exact(_gateway(cluster)), within_s=60, what="tokens from the hub that equal the engine's")
    asked: dict[str, Any] = {"model": _served(client), "temperature": 0, "max_tokens": 200}
    messages: list[Any] = [user(fresh_words(300))]
    first = client.chat.completions.create(**asked, messages=messages)
    messages += [assistant(first.choices[0].message.content or ""), user(fresh_words(10))]
    with _fleet(cluster) as (fleet, shown):
        until(lambda: _in_step(cluster, fleet, shown), within_s=60, what="the router knows what the engine holds")
        raw = client.chat.completions.with_raw_response.create(**asked, messages=messages)
        usage = raw.parse().usage
        request = fleet_pb2.GetDecisionRequest(decision_id=raw.headers["X-Pointsman-Decision"])
        predicted = fleet.GetDecision(request, metadata=shown).decision.cached_tokens
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == predicted
    # The first prompt and its answer, without the last partial block.
    assert predicted >= 384


def test_a_prompt_may_come_up_to_the_models_limit(cluster: Cluster, client: openai.OpenAI) -> None:
    model = _served(client)
    longest_prompt: list[Any] = [user(fresh_words(CONTEXT - 1 - ONE_MESSAGE))]
    longest = client.chat.completions.create(model=model, messages=longest_prompt, max_tokens=CONTEXT - 96)
    assert longest.usage is not None
    assert (longest.usage.prompt_tokens, longest.usage.completion_tokens) == (CONTEXT - 1, 1)
    assert longest.choices[0].finish_reason == "length"
    full: dict[str, Any] = {"model": model, "messages": [user(fresh_words(CONTEXT - ONE_MESSAGE))]}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**full)
    engine = ask(cluster.pods["vllm-0"].url("http") + "/v1/chat/completions", full)
    assert refused.value.status_code == engine.status == 400


async def test_a_rollout_of_the_gateway_loses_nothing(cluster: Cluster) -> None:
    """The Service leads to pods that are ready; the old one ends after its pre-stop hook, in the middle of a stream."""
    old, engine = _gateway(cluster), cluster.pods["vllm-0"]
    async with _service(cluster, old) as (service, client):
        asked: dict[str, Any] = {"model": (await client.models.list()).data[0].id, "temperature": 0}
        long = {**asked, "messages": [user(fresh_words(50))], "max_tokens": 300}
        stream = await client.chat.completions.create(**long, stream=True)
        text = "".join([await _text(stream) for _ in range(5)])

        def short() -> asyncio.Task[Any]:
            prompt: list[Any] = [user(fresh_words(5))]
            return asyncio.create_task(client.chat.completions.create(**asked, messages=prompt, max_tokens=4))

        # The engine is paused, so that the rest of the stream comes after the rollout on any machine.
        with core_paused(engine.containers["vllm"]):
            requests = [short()]
            new = cluster.pods["gateway-1"]
            new.start()
            await eventually(lambda: asyncio.to_thread(new.ready), "the new gateway ready")
            service.lead_to(new.port("http"))
            deleted = asyncio.create_task(asyncio.to_thread(old.delete))
            requests.append(short())
            await eventually(lambda: "gateway drains" in old.log("gateway"), "the old gateway told to end")
            requests.append(short())
            await eventually(lambda: _open_requests(new) == 2, "both later requests at the new gateway")
            assert not deleted.done()
        text += "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert await deleted == {"gateway": 0}
        assert [(await request).choices[0].finish_reason for request in requests] == ["length"] * 3
        again = await client.chat.completions.create(**long)
    assert text == again.choices[0].message.content
    assert again.usage is not None
    assert again.usage.completion_tokens == 300


def test_an_engine_that_is_told_to_end_ends_its_answers(cluster: Cluster, client: openai.OpenAI) -> None:
    """Runs last: without its instance the cluster answers nothing."""
    pod = cluster.pods["vllm-0"]
    engine = pod.containers["vllm"]
    asked: dict[str, Any] = {"model": _served(client), "messages": [user(fresh_words(50))], "temperature": 0}
    asked["max_tokens"] = 300
    whole = client.chat.completions.create(**asked).choices[0].message.content
    with client.chat.completions.create(**asked, stream=True) as stream:
        text = "".join(next(stream).choices[0].delta.content or "" for _ in range(5))
        with core_paused(engine):
            pod.containers["agent"].stop()
            with _fleet(cluster) as (fleet, shown):
                left = fleet.ListInstances(fleet_pb2.ListInstancesRequest(), metadata=shown).instances
            assert not left, "nothing more is placed on it"
            os.kill(engine.pid, signal.SIGTERM)
            until(lambda: "stopping engine client" in pod.log("vllm"), within_s=60, what="the engine told to end")
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole
    until(lambda: not engine.alive, within_s=60, what="the engine's end")


def _gateway(cluster: Cluster) -> Pod:
    """The gateway pod that runs."""
    [found] = [pod for name, pod in cluster.pods.items() if name.startswith("gateway-") and pod.alive]
    return found


def _exact(gateway: Pod) -> bool:
    models = ask(gateway.url("http") + "/health").json()["models"]
    return bool(models) and all(model.get("exact") for model in models.values())


def _open_requests(gateway: Pod) -> int:
    text = ask(gateway.url("http") + "/metrics").text
    [found] = re.findall(r"^pointsman_gateway_open_requests (\S+)$", text, re.MULTILINE)
    return int(float(found))


@contextmanager
def _fleet(cluster: Cluster) -> Iterator[tuple[fleet_pb2_grpc.FleetServiceStub, Any]]:
    """The router's FleetService, and the metadata with an operator's token."""
    address = f"127.0.0.1:{cluster.pods['router-0'].port('grpc')}"
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield fleet_pb2_grpc.FleetServiceStub(channel), bearer(cluster.secret("tokens", "operator"))


def _in_step(cluster: Cluster, fleet: fleet_pb2_grpc.FleetServiceStub, shown: Any) -> bool:
    """Whether the router knows exactly the keys that the engine holds, by the engine's own history."""
    sources = ask(cluster.pods["vllm-0"].url("http") + "/kv_event_sources").json()
    [status] = fleet.ListInstances(fleet_pb2.ListInstancesRequest(), metadata=shown).instances
    return bool(status.keys == len(held_pieces(sources["0"]["replay_endpoint"])))


async def _text(stream: openai.AsyncStream[ChatCompletionChunk]) -> str:
    chunk = await anext(stream)
    return chunk.choices[0].delta.content or ""


@asynccontextmanager
async def _service(cluster: Cluster, pod: Pod) -> AsyncIterator[tuple[Link, openai.AsyncOpenAI]]:
    """A stand-in for the gateways' Service, which leads to `pod`, and a client of it."""
    async with (
        Link(pod.port("http")) as service,
        openai.DefaultAsyncHttpxClient(trust_env=False) as http,
        openai.AsyncOpenAI(**_client_arguments(cluster, f"http://{service.address}"), http_client=http) as client,
    ):
        yield service, client
