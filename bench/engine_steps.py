"""CPU time that the connector's plug-in adds to an engine core's step: a scheduler that does nothing, with and without it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.figures import Figure
from tests.support.engines.vllm_questions import asking_vllm

ASK = "import step_cost; answer = step_cost.cost_us(**asked)"
# PAUSE_S: the time of a step that decodes on a GPU.
STEPS, PAUSE_S, ROUNDS = 200, 0.01, 3
# The goal: maximum CPU time of a step, us.
GOAL_US = 50.0
# Requests that decode, and prompts that are computed beside them.
BATCHES = ((16, 0), (1_024, 0), (256, 2), (256, 16))


def engine_steps(rounds_each: int = ROUNDS, batches: Sequence[tuple[int, int]] = BATCHES) -> list[Figure]:
    """Medians of so many rounds of each of the batches."""
    figures = []
    with tempfile.TemporaryDirectory() as folder, asking_vllm(Path(folder) / "log") as vllm:
        for decoding, prompts in batches:
            asked = {"folder": folder, "decoding": decoding, "prompts": prompts, "steps": STEPS, "pause_s": PAUSE_S}
            rounds = [vllm.ask(ASK, asked) for _ in range(rounds_each)]
            batch = f"{decoding} requests decode, {prompts} prompts are computed"
            for at, what, note in (
                (0, "thread", "its own thread; baseline is the goal"),
                (1, "cpu", "with ZMQ's thread"),
            ):
                cost = median(figures[at] for figures in rounds)
                baseline = GOAL_US if at == 0 else None
                figures.append(
                    Figure(f"engine_step_{what}_{decoding}_{prompts}", cost, "us", baseline, f"{batch}: {note}")
                )
    return figures
