"""The connector's messages under vLLM's AsyncScheduler, the default on GPUs: a step is scheduled while the one before it runs.

A CPU engine schedules synchronously, so these tests drive the scheduler without an engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engines.vllm_questions import Vllm
from tests.support.prompt_strategies import prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PLAY = "import async_scheduling; answer = async_scheduling.play(**asked)"
LENGTH = 192


def configs(kv_role: str, *, multi: bool) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([16, 32]),
            "kv_blocks": st.integers(8, 16),
            "max_model_len": st.just(LENGTH),
            "max_num_batched_tokens": st.integers(8, 96),
            "max_num_seqs": st.integers(2, 6),
            "long_prefill_token_threshold": st.sampled_from([0, 0, 8, 24]),
            "policy": st.sampled_from(["fcfs", "priority"]),
            "kv_role": st.just(kv_role),
            "multi": st.just(multi),
            "v2_runner": st.booleans(),
        }
    )


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": prompts([0, 16, 40, 64], st.integers(2, 120), LENGTH),
            # A request that generates takes blocks away from those that come after it.
            "max_tokens": st.just(1) | st.integers(1, 70),
            "kind": st.sampled_from(["send", "send", "send", "compute", "load"]),
            "stops": st.sampled_from([False, False, False, True]),
            "priority": st.integers(-1, 2),
        }
    ),
    min_size=2,
    max_size=8,
)


@st.composite
def scripts(draw: st.DrawFn, kv_role: str, multi: bool) -> dict[str, Any]:
    """Arrivals, steps, aborts, preemptions of all, transfers that end, and in the end steps enough for all."""
    requests = {f"r{number}": request for number, request in enumerate(draw(REQUESTS))}
    actions: list[list[Any]] = []
    submitted: list[str] = []
    for name in requests:
        actions.append(["submit", name])
        submitted.append(name)
        for _ in range(draw(st.integers(0, 8))):
            action = draw(st.sampled_from(["schedule"] * 8 + ["answer"] * 6 + ["receive", "sent", "abort", "preempt"]))
            actions.append([action, draw(st.sampled_from(submitted))])
    for _ in range(draw(st.integers(0, 12))):
        for _ in range(draw(st.integers(1, 12))):
            # As vLLM's loop: a step is scheduled before the answer of the step before it is handled.
            actions += [["schedule", None], ["answer", None]] if draw(st.booleans()) else [["schedule", None]] * 2
        actions.append([draw(st.sampled_from(["receive", "sent"])), draw(st.sampled_from(submitted))])
    return {"config": draw(configs(kv_role, multi=multi)), "requests": requests, "actions": actions}


@pytest.mark.parametrize(("kv_role", "multi"), [("kv_producer", False), ("kv_both", False), ("kv_producer", True)])
def test_each_step_tells_what_it_computes_and_what_it_overwrites(
    vllm: Vllm, model_folder: Path, kv_role: str, multi: bool
) -> None:
    """A pure producer's blocks are free as soon as their prompt is preempted, while the step before still runs. Under a
    MultiConnector the connector is the second of two."""
    happened: Counter[str] = Counter()

    @given(scripts(kv_role, multi))
    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def played(script: dict[str, Any]) -> None:
        happened.update(vllm.ask(PLAY, {"model_folder": str(model_folder), "script": script}))

    played()
    expected = {
        "overlapping",
        "later chunks",
        "complete",
        "checked",
        "confirmed",
        "sent",
        "preempted",
        "restarted",
        "aborted",
    }
    expected |= {"received"} if kv_role == "kv_both" else set()
    assert expected <= {name for name, count in happened.items() if count}, happened
