"""Layer-wise push between engines of two workers each: every rank sends its own heads to its peer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines.chat_client import fresh_words
from tests.support.engines.direct_offloads import Offload, alone, session
from tests.support.engines.fault_switches import FAULTY, WITHIN_S, assert_nothing_left, reported
from tests.support.engines.offloading import EXTERNAL, assert_tie
from tests.support.engines.servers import Engine, EngineSpec, running_engines
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

TWO_WORKERS = ("--distributed-executor-backend", "mp", "--tensor-parallel-size", "2")
LENGTHS = (1, 32, 33, 1_000)


@pytest.fixture(scope="module")
def pair(model_folder: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("two-workers")
    specs = [
        EngineSpec(
            name,
            kv_transfer=FAULTY,
            extra_args=(*TWO_WORKERS, "--max-num-batched-tokens", "256"),
            env={
                "PYTHONPATH": str(site),
                "POINTSMAN_FAULTS": str(folder / name),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # Code that vLLM runs only with several workers is compiled in their first step, also in eager mode. Each worker
                # runs a C++ compiler, which takes minutes on few cores, and the first receiver times out before that.
                "TORCHDYNAMO_DISABLE": "1",
            },
        )
        for name in ("one", "other")
    ]
    with running_engines(specs, model_folder, folder) as engines:
        yield engines


async def test_answers_are_those_of_one_engine_alone(pair: list[Engine]) -> None:
    async with session() as http:
        for p, d in (pair, reversed(pair)):
            for length in LENGTHS:
                prompt = fresh_words(length)
                seen, right = await Offload(http, p, d, prompt).answer(), await alone(http, d, prompt)
                if seen != right:
                    await asyncio.to_thread(assert_tie, d, prompt, right, seen)
    for engine in pair:
        # vLLM counts nothing for a prompt of one token.
        assert engine.metric("vllm:prompt_tokens_by_source_total", **EXTERNAL) == sum(LENGTHS) - 1
        for rank in range(2):
            assert reported(engine, rank)["pushes"] > 0
            assert reported(engine, rank)["fallbacks"] == 0
    for engine in pair:
        await asyncio.to_thread(
            until,
            lambda engine=engine: engine.metric("pointsman_kv_checked_requests_total") == len(LENGTHS),
            within_s=WITHIN_S,
            what="each request counted once as checked",
        )
    await asyncio.to_thread(assert_nothing_left, *pair, within_s=60)
