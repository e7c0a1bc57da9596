"""What a serving shadow learns from a router, and how far it is behind."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from pointsman_gateway.core.http_message import Headers
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR
from pointsman_shadow.core.pending_requests import ArrivedRequest
from pointsman_shadow.io import serve_command
from pointsman_shadow.io.fleet_queries import ServedModel
from pointsman_shadow.io.mirror_handler import MirroredRequest
from pointsman_shadow.io.placement_comparison import ModelEngines
from pointsman_shadow.io.serve_command import ShadowService
from pointsman_shadow.io.settings import ServeSettings
from tests.support.waiting import eventually


@pytest.mark.parametrize("given", [True, False])
async def test_names_and_adapters_of_a_model_are_those_that_the_router_tells(given: bool) -> None:
    source = str(TOKENIZER_DIR)
    service = ShadowService(ServeSettings(router="127.0.0.1:1", tokenizers=[f"m={source}"] if given else []))

    async def told(*lora_names: str) -> None:
        await service._add_models({"m": ServedModel(("served",), lora_names, source, ModelEngines(("e",)))})

    async def read(name: str) -> ArrivedRequest:
        body = json.dumps({"model": name, "prompt": "a b c " * 20}).encode()
        return (await service._reader.read("/v1/completions", Headers(), body, 0.0))[0]

    await told()
    await told("adapter")
    own, served, adapter = [await read(name) for name in ("m", "served", "adapter")]
    assert (served.model, served.keys) == ("m", own.keys)
    assert adapter.model == "m"
    assert len(adapter.keys) == len(own.keys) > 0
    assert adapter.keys != own.keys
    assert service._fleet is not None
    await service._fleet.close()


async def test_without_requests_the_fleets_are_not_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_command, "LOOK_S", 0.01)
    service, stop = ShadowService(ServeSettings(instances=["e"], tokenizers=[f"m={TOKENIZER_DIR}"])), asyncio.Event()
    lags: list[float] = []
    monkeypatch.setattr(service.telemetry.behind, "set", lags.append)
    running = asyncio.create_task(service.run(stop))
    body = json.dumps({"model": "m", "prompt": "a b c"}).encode()
    service._backlog.put(MirroredRequest("/v1/completions", Headers(), body, time.time() - 100))
    await eventually(lambda: max(lags, default=0.0) >= 100, within_s=10.0)
    await eventually(lambda: lags[-1] == 0, within_s=5.0)
    stop.set()
    await running
