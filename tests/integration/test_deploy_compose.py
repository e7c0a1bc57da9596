"""The compose file's profile `emulated` answers requests, and refuses callers without the right credentials."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import grpc.aio
import pytest

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_common.io.auth import bearer
from tests.support.fakes.span_collector import Collector, collecting
from tests.support.processes.compose_services import Stack, compose_stack


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
async def stack(tmp_path: Path, collector: Collector) -> AsyncIterator[Stack]:
    async with compose_stack(tmp_path, "emulated", OTLP_ENDPOINT="http://otel-collector:4317") as stack:
        stack.ports["otel-collector", "4317"] = int(collector.url.rpartition(":")[2])
        yield stack


async def test_profile_emulated_answers_requests(stack: Stack, collector: Collector) -> None:
    await stack.start_control_plane()
    url = f"{stack.url('gateway', '8080')}/v1"
    key = {"Authorization": f"Bearer {stack.secret('api-keys').partition(':')[2]}"}
    body = {"messages": [{"role": "user", "content": "Which way does the train go?"}], "max_tokens": 4}
    async with aiohttp.ClientSession() as client:
        async with client.get(f"{url}/models", headers=key) as models:
            body["model"] = (await models.json())["data"][0]["id"]
        async with client.post(f"{url}/chat/completions", json=body) as refused:
            assert refused.status == 401
        async with client.post(f"{url}/chat/completions", json=body, headers=key) as answer:
            assert answer.status == 200, await answer.text()
            assert "X-Pointsman-Degraded" not in answer.headers
            assert answer.headers["X-Pointsman-Instance"]
            assert answer.headers["X-Pointsman-Decision"]
    # Spans are exported in batches, every few seconds.
    while {span.name.partition(" ")[0] for span in collector.spans} != {"gateway", "router"}:  # noqa: ASYNC110
        await asyncio.sleep(0.1)

    router = f"127.0.0.1:{stack.ports['router', '50051']}"
    async with grpc.aio.insecure_channel(router) as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        request = fleet_pb2.ListInstancesRequest()
        with pytest.raises(grpc.aio.AioRpcError) as stranger:
            await fleet.ListInstances(request)
        assert stranger.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as agent:
            await fleet.ListInstances(request, metadata=bearer(stack.secret("agent")))
        assert agent.value.code() is grpc.StatusCode.PERMISSION_DENIED
        # An instance answers before its keys are complete, so this may take a moment more.
        states: list[int] = []
        while states != [fleet_pb2.INSTANCE_STATE_READY] * 2:
            listed = await fleet.ListInstances(request, metadata=bearer(stack.secret("operator")))
            states = [instance.state for instance in listed.instances]

    password = stack.secret("redis-password")
    for log in stack.folder.glob("*.log"):
        text = log.read_text()
        secrets = [password, *map(stack.secret, ("agent", "gateway", "operator"))]
        assert not any(secret in text for secret in secrets), f"{log.name} shows a secret"


# Replaces vLLM: an emulated engine that listens where its flags say and announces the connector that they name.
VLLM = f"""#!{sys.executable}
import json, os, sys
from prometheus_client.core import GaugeMetricFamily
from pointsman_lab.emulator import vllm_metrics
from pointsman_cli import main as command_line
given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
events = json.loads(given["kv-events-config"])
ports = [events[name].rpartition(":")[2] for name in ("endpoint", "replay_endpoint")]
kv = json.loads(given["kv-transfer-config"])
print("devices", os.environ["CUDA_VISIBLE_DEVICES"], "connector", kv["kv_connector"], flush=True)
own = vllm_metrics.EngineMetrics.collect
def collect(metrics):
    yield from own(metrics)
    labels = dict(protocol="mooncake", role=kv["kv_role"], layerwise=str(kv["kv_connector"].startswith("Layerwise")))
    family = GaugeMetricFamily("pointsman_kv_transfer_info", "as the connector package has it", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    yield family
vllm_metrics.EngineMetrics.collect = collect
sys.argv = ["pointsman", "emulate", "--port", given["port"], "--kv-events-port", ports[0], "--replay-port", ports[1],
            "--model", given["served-model-name"], "--max-model-len", given["max-model-len"]]
command_line.main()
"""


async def test_profile_gpu2_has_an_instance_on_each_gpu_that_passes_kv_on(tmp_path: Path) -> None:
    async with compose_stack(tmp_path, "gpu2", above=["offload.yaml"], POLICY="elastic") as stack:
        program = tmp_path / "bin/vllm"
        program.write_text(VLLM)
        program.chmod(0o755)
        assert {name for name in stack.services if "vllm" in name} == {"vllm-0", "vllm-1"}
        for name in ("redis", "vllm-0", "vllm-1"):
            await stack.start(name)
        await stack.until_healthy("redis")
        await stack.start("router")
        await stack.until_healthy("router")
        await stack.start("agent-gpu2")
        await stack.until_healthy("vllm-0", "vllm-1", "agent-gpu2")
        for number in range(2):
            assert f"devices {number} connector LayerwiseMooncakeConnector" in stack.log(f"vllm-{number}")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.ports['router', '50051']}") as channel:
            fleet = fleet_pb2_grpc.FleetServiceStub(channel)
            listed = fleet_pb2.ListInstancesResponse()
            while [instance.state for instance in listed.instances] != [fleet_pb2.INSTANCE_STATE_READY] * 2:
                operator = bearer(stack.secret("operator"))
                listed = await fleet.ListInstances(fleet_pb2.ListInstancesRequest(), metadata=operator)
        assert listed.policy.name == "elastic"
        for status in listed.instances:
            instance = status.instance
            assert instance.model == "qwen3-coder"
            assert instance.prefix_mode == agent_pb2.PREFIX_MODE_EXACT
            kv = instance.kv_transfer
            assert (kv.protocol, kv.layerwise) == (agent_pb2.KV_PROTOCOL_MOONCAKE, True)
