"""Age of the reported load in decisions about a real engine that works, with and without its step loads.

Four clients send requests one after the other to one vLLM on CPU, through the whole control plane. Without step loads the agent
scrapes /metrics each second, as by default.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai

from bench.figures import Figure, percentile
from pointsman.router.v1 import fleet_pb2
from tests.support.engines.chat_client import fresh_words
from tests.support.engines.fault_switches import installed
from tests.support.engines.servers import SERVED_NAME, EngineSpec, make_model, running_engines
from tests.support.processes.control_plane import ControlPlane

CLIENTS, REQUESTS_EACH = 4, 15
# The goal: median age, ms.
GOAL_MS = 60.0


def report_age() -> list[Figure]:
    """Percentiles of both runs, and how many samples the prefill curve was learned from."""
    with tempfile.TemporaryDirectory(prefix="pointsman-age-") as name:
        folder = Path(name)
        address = f"ipc://{folder}/loads"
        environment = {"PYTHONPATH": str(installed(folder / "connector")), "POINTSMAN_AGENT_LOADS": address}
        model = make_model(folder / "model", folder / "adapter")
        figures = []
        with running_engines([EngineSpec("a", env=environment)], model, folder) as engines:
            for kind in ("steps", "scraped"):
                below = folder / kind
                below.mkdir()
                flags: dict[str, object] = {"--scrape-interval-s": 1.0}
                if kind == "steps":
                    flags["--step-loads-listen"] = address
                with ControlPlane(engines, below, agent_flags=flags).running() as plane:
                    ages = _ages(plane)
                for share in (0.5, 0.9):
                    goal = GOAL_MS if kind == "steps" and share == 0.5 else None
                    note = f"{len(ages)} decisions" + ("; baseline is the goal" if goal else "")
                    figures.append(
                        Figure(f"report_age_{kind}_p{share * 100:.0f}", percentile(ages, share), "ms", goal, note)
                    )
    return figures


def _ages(plane: ControlPlane) -> list[float]:
    """Load the engine; return the age of its report in each decision, ms."""
    with plane.client() as client, ThreadPoolExecutor(CLIENTS) as pool:
        found = pool.map(lambda number: _client(plane, client, number), range(CLIENTS))
        return [age for ages in found for age in ages]


def _client(plane: ControlPlane, client: openai.OpenAI, number: int) -> list[float]:
    ages: list[float] = []
    for _ in range(REQUESTS_EACH):
        answer = client.completions.with_raw_response.create(
            model=SERVED_NAME, prompt=fresh_words(200), max_tokens=60 + number
        )
        decision: fleet_pb2.Decision = plane.decision(answer.headers["X-Pointsman-Decision"])
        ages += [candidate.report_age.ToMilliseconds() for candidate in decision.candidates]
    return ages
