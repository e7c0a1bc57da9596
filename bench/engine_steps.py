"""What the connector's plug-in costs an engine core at each step, as CPU time: a scheduler that does nothing, with and without it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from bench.figures import Figure
from tests.support.engines.vllm_questions import asking_vllm

ASK = "import observed_steps; answer = observed_steps.cost_us(**asked)"
STEPS, ROUNDS = 10_000, 5
# The goal: maximum CPU time of a step, us.
GOAL_US = 50.0
# Requests that decode, and prompts that are computed beside them.
BATCHES = ((16, 0), (256, 0), (1_024, 0), (256, 2), (256, 16))


def engine_steps() -> list[Figure]:
    """Medians of ROUNDS rounds."""
    figures = []
    with tempfile.TemporaryDirectory() as folder, asking_vllm(Path(folder) / "log") as vllm:
        for decoding, prompts in BATCHES:
            asked = {"folder": folder, "decoding": decoding, "prompts": prompts, "steps": STEPS}
            cost = median(vllm.ask(ASK, asked) for _ in range(ROUNDS))
            note = f"{decoding} requests decode, {prompts} prompts are computed; baseline is the goal"
            figures.append(Figure(f"engine_step_cpu_{decoding}_{prompts}", cost, "us", GOAL_US, note))
    return figures
