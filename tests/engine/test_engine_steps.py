"""What the connector's plug-in tells of an engine's steps is what vLLM's own schedulers have scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.vllm_questions import Vllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]

ASK = "import observed_steps; answer = observed_steps.play(**asked)"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kv_blocks", [400, 24])
def test_the_steps_of_vllms_schedulers(
    vllm: Vllm, model_folder: Path, tmp_path: Path, asynchronous: bool, kv_blocks: int
) -> None:
    prompts = [200, 90, 1, 64, 150, 33]
    reported: dict[str, Any] = vllm.ask(
        ASK,
        {
            "model_folder": str(model_folder),
            "folder": str(tmp_path),
            "asynchronous": asynchronous,
            "kv_blocks": kv_blocks,
            "prompts": prompts,
        },
    )
    assert reported["scheduler"] == ("AsyncScheduler" if asynchronous else "Scheduler")
    assert reported["wrong_left"] == 0
    assert (reported["preemptions"] > 0) is (kv_blocks == 24), "too few blocks for all"
    totals, real = reported["pushed"]["totals"], reported["real"]
    assert {name: totals[name] for name in real} == real
    assert totals["prefills"] >= len(prompts)
    assert 0 < totals["prefill_seconds"] <= totals["seconds"]
    assert (reported["pushed"]["running"], reported["pushed"]["prefill_tokens_left"]) == (0, 0)
