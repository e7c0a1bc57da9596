"""An agent that follows a Service of Kubernetes: the real client library before a scripted API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import zmq.asyncio

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core import engine_life
from pointsman_agent.io import engine_services
from pointsman_agent.io.engine_services import FIRST_PAUSE_S
from tests.support.fakes.agent_peers import FakeEngine, FakeRouter, RunningAgent
from tests.support.fakes.kubernetes_api import FakeKubernetes, endpoint, endpoint_slice
from tests.support.kv_events import store
from tests.support.waiting import eventually


@dataclass
class Cluster:
    """Two engines, a router, an API server, and an agent that knows no engine's address."""

    engines: list[FakeEngine]
    router: FakeRouter
    api: FakeKubernetes
    agent: RunningAgent

    def slice(self, *engines: int, name: str = "vllm-a") -> dict[str, object]:
        """A slice whose endpoints are these engines: all are on one address, so each has a slice of its own by its port."""
        [at] = engines
        ports = [{"name": "http", "port": self.engines[at].port, "protocol": "TCP"}]
        return endpoint_slice(name, [endpoint("127.0.0.1")], ports=ports)

    def known(self) -> set[int]:
        """The engines that the router knows."""
        open_streams = [stream for stream in self.router.streams if not stream.ended]
        ids = {stream.hello.instance.instance_id for stream in open_streams}
        return {at for at, engine in enumerate(self.engines) if f"127.0.0.1:{engine.port}" in ids}


@pytest.fixture
async def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as running:
        context = zmq.asyncio.Context()
        running.callback(context.destroy, linger=0)
        engines = [FakeEngine(context) for _ in range(2)]
        router = FakeRouter()
        parts: list[FakeEngine | FakeRouter] = [*engines, router]
        for part in parts:
            await part.start()
            running.push_async_callback(part.stop)
        api = FakeKubernetes()
        monkeypatch.setenv("KUBECONFIG", str(await running.enter_async_context(api.serve(tmp_path))))
        agent = RunningAgent(
            [], [router.address], tmp_path / "state", engine_services=["llm/vllm:http"], save_interval_s=0.1
        )
        up = Cluster(engines, router, api, agent)
        try:
            yield up
        finally:
            await agent.stop()


async def test_engines_come_and_go_with_their_endpoints(up: Cluster) -> None:
    await eventually(lambda: up.api.watches == 1, "the agent watches")
    assert up.api.queries[0]["labelSelector"] == "kubernetes.io/service-name=vllm"
    assert up.api.token == "Bearer secret"
    up.api.change("ADDED", up.slice(0, name="a"))
    await eventually(lambda: up.known() == {0}, "the first engine")
    up.api.change("ADDED", up.slice(1, name="b"))
    await eventually(lambda: up.known() == {0, 1}, "both engines")
    up.api.change("DELETED", up.slice(0, name="a"))
    await eventually(lambda: up.known() == {1}, "the second engine alone")
    gone = next(stream for stream in up.router.streams if stream.ended)
    assert gone.goodbye == "its endpoint is gone"
    up.api.change("MODIFIED", up.slice(0, name="b"))
    await eventually(lambda: up.known() == {0}, "the slice has another engine")


async def test_two_ports_of_a_service_are_followed_side_by_side(up: Cluster, tmp_path: Path) -> None:
    services = ["llm/vllm:a", "llm/vllm:b"]
    agent = RunningAgent([], [up.router.address], tmp_path / "ports", engine_services=services)
    try:
        ports = [{"name": name, "port": engine.port} for name, engine in zip("ab", up.engines, strict=True)]
        up.api.change("ADDED", endpoint_slice("s", [endpoint("127.0.0.1")], ports=ports))
        await eventually(lambda: up.known() == {0, 1}, "both engines")
        up.api.change("MODIFIED", endpoint_slice("s", [endpoint("127.0.0.1"), endpoint("127.0.0.1")], ports=ports))
        await eventually(lambda: up.api.watches >= 3, "all watch")
        assert up.known() == {0, 1}
        assert not any(stream.goodbye for stream in up.router.streams)
    finally:
        await agent.stop()


async def test_what_was_saved_of_an_engine_goes_with_its_endpoint(up: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rollout would leave a file for each pod in a volume that may be small."""
    monkeypatch.setattr(engine_life, "GONE_AFTER_S", 0.5)
    for engine in up.engines:
        engine.ranks = [0, 1]
    up.api.change("ADDED", up.slice(0, name="a"))
    up.api.change("ADDED", up.slice(1, name="b"))

    def saved() -> set[str]:
        return {path.name for path in up.agent.settings.state_dir.glob("*.blocks")}

    files = [{f"127.0.0.1%3A{engine.port}%2F{rank}.blocks" for rank in (0, 1)} for engine in up.engines]
    await eventually(lambda: saved() == files[0] | files[1], "the files of both engines")
    up.api.change("DELETED", up.slice(0, name="a"))
    await eventually(lambda: saved() == files[1], "those of the engine that stays")
    await up.engines[1].stop()
    await eventually(lambda: all(stream.ended for stream in up.router.streams), "it does not answer")
    assert saved() == files[1], "it may come back"
    up.api.change("DELETED", up.slice(1, name="b"))
    await eventually(lambda: not saved(), "none")


def reported(loads: list[pb.Load], healthy: bool, problem: str) -> bool:
    """Whether the last load says this."""
    return (loads[-1].healthy, loads[-1].problem) == (healthy, problem)


async def test_an_endpoint_that_is_not_ready_is_unhealthy_with_its_keys_and_leaves_when_it_ends(up: Cluster) -> None:
    engine = up.engines[0]
    found = up.slice(0, name="a")
    up.api.change("ADDED", found)
    await eventually(lambda: up.known() == {0}, "the engine")
    await engine.publish(store((1, 2)))
    instance = f"127.0.0.1:{engine.port}"
    await eventually(lambda: up.router.keys(instance), "its keys")
    loads = up.router.streams[0].loads
    for ready in (False, True, False):
        up.api.change("MODIFIED", found | {"endpoints": [endpoint("127.0.0.1", ready=ready)]})
        problem = "" if ready else "its endpoint is not ready"
        await eventually(partial(reported, loads, ready, problem), f"ready: {ready}")
    assert up.router.keys(instance)
    assert len(up.router.streams) == 1
    assert up.router.streams[0].goodbye is None
    up.api.change("MODIFIED", found | {"endpoints": [endpoint("127.0.0.1", ready=False, terminating=True)]})
    await eventually(lambda: up.router.streams[0].goodbye == "its endpoint is gone", "a goodbye")


async def test_while_the_api_does_not_answer_the_engines_stay(up: Cluster) -> None:
    up.api.change("ADDED", up.slice(0, name="a"))
    await eventually(lambda: up.known() == {0}, "the first engine")
    await eventually(lambda: up.api.watches == 1, "the agent watches")
    up.api.status = 500
    before = len(up.api.queries)
    up.api.send(None)
    await eventually(lambda: len(up.api.queries) >= before + 2, "it has failed twice", within_s=20 * FIRST_PAUSE_S)
    assert up.known() == {0}
    up.api.slices["b"] = up.slice(1, name="b")
    up.api.status = 200
    await eventually(lambda: up.known() == {0, 1}, "what has changed meanwhile")


async def test_a_watch_that_is_too_old_begins_anew(up: Cluster) -> None:
    await eventually(lambda: up.api.watches == 1, "the agent watches")
    up.api.slices["a"] = up.slice(0, name="a")
    gone = {"kind": "Status", "status": "Failure", "reason": "Expired", "message": "too old", "code": 410}
    up.api.send({"type": "ERROR", "object": gone})
    await eventually(lambda: up.known() == {0}, "the list is read again")


async def test_a_watch_that_dies_without_a_word_is_noticed(up: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await eventually(lambda: up.api.watches == 1, "the agent watches")
    monkeypatch.setattr(engine_services, "WATCH_S", 0.2)
    monkeypatch.setattr(engine_services, "ANSWER_S", 0.2)
    up.api.send(None)
    await eventually(lambda: up.api.watches == 1, "it watches with other limits")
    up.api.slices["a"] = up.slice(0, name="a")
    await eventually(lambda: up.known() == {0}, "what no watch has reported")
