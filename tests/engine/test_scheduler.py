"""The lab's engine model schedules as vLLM's own scheduler does: both are given the same arrivals, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pointsman_lab.engine.block_cache import AllCleared, BlocksRemoved, BlocksStored
from pointsman_lab.engine.interface import EngineConfig, EngineRequest, FirstToken, Preempted, TokenGenerated
from pointsman_lab.engine.model import EngineModel
from tests.support.engines.vllm_questions import Vllm
from tests.support.prompt_strategies import prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PLAY = "import vllm_scheduler; answer = vllm_scheduler.play(**asked)"
LENGTH = 192


def model_of(script: dict[str, Any]) -> EngineModel:
    return EngineModel(EngineConfig(**script["config"]))


def play(script: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the script; return what the model does, and add the answers to the script's requests."""
    model = model_of(script)
    requests = script["requests"]
    for asked in requests.values():
        asked["answer"] = []
    names: dict[int, str] = {}
    steps = []
    for number, (action, name) in enumerate(script["actions"]):
        now = float(number)
        if action == "submit":
            asked = requests[name]
            model.submit(
                EngineRequest(
                    name,
                    asked["prompt"],
                    asked["max_tokens"],
                    ignore_eos=True,
                    remote_tokens=asked["remote_tokens"],
                    priority=asked["priority"],
                ),
                now,
            )
        elif action == "abort":
            model.abort(name, now)
        elif action == "receive":
            model.receive(name, now)
        elif action == "reset":
            model.reset_prefix_cache()
        else:
            has_work = model.has_work
            result = model.step(now)
            assert has_work or not result.scheduled, "a model without work schedules nothing"
            for event in result.events:
                if isinstance(event, TokenGenerated):
                    requests[event.request_id]["answer"].append(event.token_id)
            firsts = [event for event in result.events if isinstance(event, FirstToken)]
            steps.append(
                {
                    "scheduled": [[*pair] for pair in result.scheduled.items()],
                    "preempted": [event.request_id for event in result.events if isinstance(event, Preempted)],
                    "events": _blocks(result.events, model.config.block_size, names),
                    "awaited": sorted(request.request_id for request in result.awaited),
                    "prefills": {event.request_id: [event.cached_tokens, event.remote_tokens] for event in firsts},
                    "running": model.num_running,
                    "waiting": model.num_waiting,
                    "free": model.cache.free,
                }
            )
            model.finish_step()
            model.cache.check()
    for asked in requests.values():
        asked["answer"] += [0] * (asked["max_tokens"] - len(asked["answer"]))
    return steps


def _blocks(events: list[Any], size: int, names: dict[int, str]) -> list[list[str]]:
    listed = []
    for event in events:
        if isinstance(event, BlocksStored):
            text = names.get(event.parent, "") if event.parent is not None else ""
            for index, value in enumerate(event.hashes):
                text += "".join(f"{token} " for token in event.token_ids[index * size : (index + 1) * size])
                names[value] = text
                listed.append(["stored", text])
        elif isinstance(event, BlocksRemoved):
            listed += [["removed", names[value]] for value in event.hashes]
        elif isinstance(event, AllCleared):
            listed.append(["cleared", ""])
    return listed


CONFIGS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([16, 32]),
        "kv_blocks": st.integers(12, 20),
        "max_model_len": st.just(LENGTH),
        "max_num_batched_tokens": st.integers(8, 96),
        "max_num_seqs": st.integers(1, 6),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 8, 24]),
        "long_prefill_token_threshold_adaptive": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.1, 0.3]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    }
)
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": prompts([0, 16, 40, 64], st.integers(2, 120) | st.integers(2, 60), LENGTH),
            "max_tokens": st.integers(1, 40) | st.integers(20, 120),
            "priority": st.integers(-1, 2),
            "remote_tokens": st.sampled_from([0, 0, 0, 32, 200]),
        }
    ),
    min_size=1,
    max_size=8,
)


@st.composite
def scripts(draw: st.DrawFn) -> dict[str, Any]:
    """Arrivals, steps, aborts, transfers that end, and in the end steps enough for all."""
    requests = {f"r{number}": request for number, request in enumerate(draw(REQUESTS))}
    actions: list[list[Any]] = []
    submitted: list[str] = []
    for name in requests:
        actions.append(["submit", name])
        submitted.append(name)
        for _ in range(draw(st.integers(0, 4))):
            action = draw(st.sampled_from(["step"] * 8 + ["receive", "receive", "abort", "reset"]))
            of = draw(st.sampled_from(submitted)) if action in ("receive", "abort") else None
            actions.append([action, of])
    for _ in range(draw(st.integers(0, 12))):
        actions += [["step", None]] * draw(st.integers(1, 12))
        actions.append(["receive", draw(st.sampled_from(submitted))])
    return {"config": draw(CONFIGS), "requests": requests, "actions": actions}


def compare(vllm: Vllm, model: Path, script: dict[str, Any]) -> None:
    ours = play(script)
    theirs = vllm.ask(PLAY, {"model": str(model), "script": script})
    for number, (expected, got) in enumerate(zip(theirs, ours, strict=True)):
        assert got == expected, f"step {number}"


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts())
def test_every_step_is_vllms(vllm: Vllm, model_folder: Path, script: dict[str, Any]) -> None:
    compare(vllm, model_folder, script)
