"""Layer-wise push between engines of two workers each: every rank sends its own heads to its peer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.direct_offloads import Offload, alone, session
from tests.engine.offloading import EXTERNAL, assert_tie
from tests.engine.servers import LAYERWISE, Engine, EngineSpec, running_engines
from tests.engine.talk import fresh_words

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TWO_WORKERS = ("--distributed-executor-backend", "mp", "--tensor-parallel-size", "2")
LENGTHS = (1, 31, 32, 33, 300, 1_000)


@pytest.fixture(scope="module")
def pair(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    specs = [
        EngineSpec(
            name,
            kv_transfer=LAYERWISE,
            extra_args=(*TWO_WORKERS, "--max-num-batched-tokens", "256"),
            env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
        for name in ("two-p", "two-d")
    ]
    with running_engines(specs, model_folder, tmp_path_factory.mktemp("two-workers")) as engines:
        yield engines


async def test_answers_are_those_of_one_engine_alone(pair: list[Engine]) -> None:
    p, d = pair
    async with session() as http:
        for length in LENGTHS:
            prompt = fresh_words(length)
            seen, right = await Offload(http, p, d, prompt).answer(), await alone(http, d, prompt)
            if seen != right:
                await asyncio.to_thread(assert_tie, d, prompt, right, seen)
    # Of a prompt of one token vLLM counts nothing.
    assert d.metric("vllm:prompt_tokens_by_source_total", **EXTERNAL) == sum(LENGTHS) - 1
