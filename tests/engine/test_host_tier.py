"""The lab's host tier and storage store, load and evict the blocks that vLLM's own OffloadingConnector does, with one tier and
with TieringOffloadingManager: both are given the same arrivals and transfer times, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pointsman_lab.engine.block_cache import BlocksRemoved, BlocksStored
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.host_tier import OffloadedRemoved, OffloadedStored
from pointsman_lab.engine.interface import EngineConfig, EngineRequest, FirstToken, Preempted, TokenGenerated
from pointsman_lab.engine.model import EngineModel
from pointsman_lab.engine.request_queue import EngineSequence
from tests.support.engines.vllm_questions import Vllm
from tests.support.prompt_strategies import prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PLAY = "import vllm_host_tier; answer = vllm_host_tier.play(**asked)"
LENGTH = 192
# A step takes 1 s.
PLAIN = {
    "step_s": 1.0,
    "prefill_token_s": 0.0,
    "prefill_pair_s": 0.0,
    "decode_sequence_s": 0.0,
    "decode_kv_token_s": 0.0,
}


class Player:
    """Runs a script on the engine model, and adds the answers to the script's requests."""

    def __init__(self, script: dict[str, Any]) -> None:
        config = dict(script["config"])
        times = {name: config.pop(name) for name in ("host_s", "host_token_s", "storage_s", "storage_token_s")}
        self.storage: set[int] | None = set() if script["storage"] else None
        profile = Profile(**PLAIN, **times)
        self.model = EngineModel(EngineConfig(max_model_len=LENGTH, **config), profile, self.storage)
        self.requests = script["requests"]
        self.names: dict[int, str] = {}
        self.now = 0.0
        for asked in self.requests.values():
            asked["answer"] = []
        # The requests that the current step begins to load for. Their loads may have ended at its end.
        self.awaited: list[str] = []
        offloading: Any = self.model.offloading
        load = offloading.load

        def recorded(sequence: EngineSequence, *args: Any) -> Any:
            self.awaited.append(sequence.request.request_id)
            return load(sequence, *args)

        offloading.load = recorded

    def play(self, actions: list[list[Any]]) -> list[dict[str, Any]]:
        steps = []
        for number, (action, name) in enumerate(actions):
            if action == "submit":
                asked = self.requests[name]
                request = EngineRequest(
                    name, asked["prompt"], asked["max_tokens"], ignore_eos=True, priority=asked["priority"]
                )
                self.model.submit(request, float(number))
            elif action == "abort":
                self.model.abort(name, self.now)
            elif action == "wait":
                self.now += name
            else:
                steps.append(self.step())
        for asked in self.requests.values():
            asked["answer"] += [0] * (asked["max_tokens"] - len(asked["answer"]))
        return steps

    def step(self) -> dict[str, Any]:
        model = self.model
        self.awaited.clear()
        ended = model.next_transfer_end
        has_work = model.has_work or (ended is not None and ended <= self.now)
        result = model.step(self.now)
        assert has_work or not result.scheduled, "a model without work schedules nothing"
        self.now += result.duration_s
        for event in result.events:
            if isinstance(event, TokenGenerated):
                self.requests[event.request_id]["answer"].append(event.token_id)
        firsts = [event for event in result.events if isinstance(event, FirstToken)]
        own, host = self.events(result.events)
        assert model.offloading is not None
        step = {
            "seconds": result.duration_s,
            "scheduled": [[*pair] for pair in result.scheduled.items()],
            "preempted": [event.request_id for event in result.events if isinstance(event, Preempted)],
            "events": own,
            "host events": host,
            "awaited": sorted(self.awaited),
            "prefills": {
                event.request_id: [event.cached_tokens, event.host_tokens + event.storage_tokens] for event in firsts
            },
            "running": model.num_running,
            "waiting": model.num_waiting,
            "free": model.cache.free,
            "host": [[self.names[block], users] for block, users in model.offloading.host._blocks.items()],
            "storage": sorted(self.names[block] for block in self.storage or ()),
        }
        model.finish_step()
        model.cache.check()
        model.offloading.host.check()
        return step

    def events(self, events: list[Any]) -> tuple[list[list[str]], list[list[str]]]:
        size = self.model.config.block_size
        own: list[list[str]] = []
        host: list[list[str]] = []
        for event in events:
            if isinstance(event, BlocksStored | OffloadedStored):
                text = ""
                if isinstance(event, BlocksStored) and event.parent is not None:
                    text = self.names.get(event.parent, "")
                for index, value in enumerate(event.hashes):
                    if isinstance(event, OffloadedStored):
                        parent = event.parents[index]
                        text = self.names[parent] if parent is not None else ""
                    text += "".join(f"{token} " for token in event.token_ids[index * size : (index + 1) * size])
                    self.names[value] = text
                    if isinstance(event, BlocksStored):
                        own.append(["stored", text])
                    else:
                        host.append(["stored", text, event.medium])
            elif isinstance(event, BlocksRemoved):
                own += [["removed", self.names[value]] for value in event.hashes]
            elif isinstance(event, OffloadedRemoved):
                host += [["removed", self.names[value], event.medium] for value in event.hashes]
        return own, sorted(host)


CONFIGS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([16, 32]),
        "kv_blocks": st.integers(12, 20),
        "host_blocks": st.integers(3, 40),
        "max_num_batched_tokens": st.integers(8, 96),
        "max_num_seqs": st.integers(1, 6),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        # No sums of these are whole seconds.
        "host_s": st.sampled_from([0.0137, 0.371, 1.613]),
        "host_token_s": st.sampled_from([0.00071, 0.0113]),
        "storage_s": st.sampled_from([0.0171, 0.779, 3.119]),
        "storage_token_s": st.sampled_from([0.00037, 0.0077]),
    }
)
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            # Most prompts are so long that two of them do not fit into the engine's own cache.
            "prompt": prompts(
                [0, 0, 0, 0, 16, 40, 64, 96],
                st.sampled_from([150, 144, 130, 150, 96, 64]) | st.integers(2, 150),
                LENGTH,
            ),
            "max_tokens": st.sampled_from([1, 2, 6]) | st.integers(1, 40),
            "priority": st.integers(-1, 2),
        }
    ),
    min_size=2,
    max_size=16,
)


@st.composite
def scripts(draw: st.DrawFn) -> dict[str, Any]:
    """Arrivals, steps, waits and aborts, and in the end steps enough for most."""
    requests = {f"r{number}": request for number, request in enumerate(draw(REQUESTS))}
    actions: list[list[Any]] = []
    submitted: list[str] = []
    for name in requests:
        actions.append(["submit", name])
        submitted.append(name)
        for _ in range(draw(st.integers(0, 3))):
            action = draw(st.sampled_from(["steps"] * 5 + ["step", "step", "wait", "abort"]))
            if action == "steps":
                actions += [["step", None]] * draw(st.sampled_from([2, 9, 20, 30])) + [["wait", 1.27], ["step", None]]
            elif action == "wait":
                actions.append(["wait", draw(st.sampled_from([0.31, 2.77]))])
            else:
                actions.append([action, draw(st.sampled_from(submitted)) if action == "abort" else None])
    for _ in range(draw(st.integers(0, 3))):
        actions += [["step", None]] * draw(st.integers(1, 20)) + [["wait", 1.51]]
    return {"config": draw(CONFIGS), "storage": draw(st.booleans()), "requests": requests, "actions": actions}


def compare(vllm: Vllm, model: Path, script: dict[str, Any]) -> list[dict[str, Any]]:
    """Assert that the model does in every step what vLLM does; return vLLM's steps."""
    ours = Player(script).play(script["actions"])
    theirs: list[dict[str, Any]] = vllm.ask(PLAY, {"model": str(model), "script": script})
    for number, (expected, got) in enumerate(zip(theirs, ours, strict=True)):
        assert got == expected | {"seconds": pytest.approx(expected["seconds"])}, f"step {number}"
    return theirs


# The load of an aborted request ends within a step.
STEPS: list[list[Any]] = [["step", None]] * 3 + [["wait", 1.27]]
ABORTED_LOAD: dict[str, Any] = {
    "config": {
        "block_size": 16,
        "kv_blocks": 12,
        "host_blocks": 4,
        "max_num_batched_tokens": 20,
        "max_num_seqs": 1,
        "scheduling_policy": "fcfs",
        "host_s": 1.613,
        "host_token_s": 0.00071,
        "storage_s": 0.0171,
        "storage_token_s": 0.00037,
    },
    "storage": False,
    "requests": {
        "r0": {"prompt": [4] * 150, "max_tokens": 1, "priority": 0},
        "r1": {"prompt": [4] * 96, "max_tokens": 1, "priority": 0},
        "r2": {"prompt": [3, 3], "max_tokens": 1, "priority": 0},
        "r3": {"prompt": [3] * 150, "max_tokens": 1, "priority": 0},
    },
    "actions": [
        ["submit", "r0"],
        *STEPS,
        *STEPS,
        ["step", None],
        ["submit", "r1"],
        *STEPS[1:],
        ["step", None],
        ["abort", "r1"],
        ["submit", "r2"],
        ["submit", "r3"],
        *STEPS[1:],
        ["step", None],
    ],
}

# What one request has in storage does not fit into host memory: each lookup evicts what the last one has brought there. Its steps
# schedule nothing, and yet the next one finds other blocks.
REPEATED_LOOKUPS: dict[str, Any] = {
    "config": {
        "block_size": 16,
        "kv_blocks": 12,
        "host_blocks": 4,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 2,
        "scheduling_policy": "fcfs",
        "host_s": 0.0137,
        "host_token_s": 0.00071,
        "storage_s": 0.0171,
        "storage_token_s": 0.00037,
    },
    "storage": True,
    "requests": {
        "r0": {"prompt": [5] * 130, "max_tokens": 1, "priority": 0},
        **{f"r{number}": {"prompt": [3] * 150, "max_tokens": 1, "priority": 0} for number in range(1, 10)},
        "r10": {"prompt": [5] * 150, "max_tokens": 1, "priority": 0},
        "r11": {"prompt": [3] * 150, "max_tokens": 1, "priority": 0},
    },
    "actions": [
        *[["submit", f"r{number}"] for number in range(7)],
        *STEPS[1:],
        *STEPS,
        *STEPS,
        ["step", None],
        *[["submit", f"r{number}"] for number in range(7, 12)],
        *STEPS[1:],
        *STEPS,
        *STEPS,
    ],
}

# A step preempts its only request, waits for the copies of that one's blocks, and schedules nothing.
LONE_PREEMPTION: dict[str, Any] = {
    "config": ABORTED_LOAD["config"] | {"host_blocks": 13, "max_num_batched_tokens": 38},
    "storage": False,
    "requests": {
        **{f"r{number}": {"prompt": [3] * 150, "max_tokens": 1, "priority": 0} for number in range(7)},
        "r5": {"prompt": [4] * 150, "max_tokens": 1, "priority": 0},
        "r7": {"prompt": [1] * 16 + [3] * 80, "max_tokens": 2, "priority": 0},
    },
    "actions": [
        *[["submit", f"r{number}"] for number in range(4)],
        *STEPS[1:],
        *STEPS,
        *STEPS,
        ["step", None],
        *[["submit", f"r{number}"] for number in range(4, 8)],
        *[["step", None]] * 9,
        ["wait", 1.27],
        ["step", None],
    ],
}


@example(script=LONE_PREEMPTION)
@example(script=ABORTED_LOAD)
@example(script=REPEATED_LOOKUPS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts())
def test_every_step_is_vllms(vllm: Vllm, model_folder: Path, script: dict[str, Any]) -> None:
    compare(vllm, model_folder, script)


def test_evicted_blocks_are_loaded_as_vllm_loads_them(vllm: Vllm, model_folder: Path) -> None:
    prompts = [[letter] * 150 for letter in range(1, 5)]
    requests = {f"r{number}": {"prompt": prompts[number % 4], "max_tokens": 8, "priority": 0} for number in range(12)}
    actions: list[list[Any]] = []
    for name in requests:
        actions += [
            ["submit", name],
            *([["step", None]] * 9),
            ["wait", 1.27],
            *([["step", None]] * 9),
            ["wait", 1.27],
            *([["step", None]] * 9),
        ]
    config = {
        "block_size": 16,
        "kv_blocks": 14,
        "host_blocks": 40,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 2,
        "scheduling_policy": "fcfs",
        "host_s": 0.371,
        "host_token_s": 0.0007,
        "storage_s": 0.779,
        "storage_token_s": 0.0007,
    }
    script = {"config": config, "storage": False, "requests": requests, "actions": actions}
    steps = compare(vllm, model_folder, script)
    loaded = {name: counts[1] for step in steps for name, counts in step["prefills"].items()}
    assert [loaded[f"r{number}"] for number in range(12)] == [0] * 4 + [144] * 8
    assert sum(len(step["host events"]) for step in steps) == 36
    # With less host memory the blocks come back from storage.
    steps = compare(vllm, model_folder, script | {"storage": True, "config": config | {"host_blocks": 12}})
    loaded = {name: counts[1] for step in steps for name, counts in step["prefills"].items()}
    assert [loaded[f"r{number}"] for number in range(12)] == [0] * 4 + [144] * 8
    assert len(steps[-1]["storage"]) == 36
