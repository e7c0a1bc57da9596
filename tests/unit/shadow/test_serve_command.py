"""What a serving shadow learns from a router."""

from __future__ import annotations

import json

import pytest

from pointsman_gateway.core.http_message import Headers
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR
from pointsman_shadow.core.pending_requests import ArrivedRequest
from pointsman_shadow.io.fleet_queries import ServedModel
from pointsman_shadow.io.placement_comparison import ModelEngines
from pointsman_shadow.io.serve_command import ShadowService
from pointsman_shadow.io.settings import ServeSettings


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
