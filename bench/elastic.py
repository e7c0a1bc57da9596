"""Elastic offload on real engines: the share of HEAVY requests that are offloaded as load rises, and the reasons of the others.

Two vLLM on CPU transfer KV over Mooncake and TCP. Both stream long answers meanwhile; for `decode_idle` they have none. Each
client sends HEAVY prompts of 700 new tokens one after the other, with a short prompt between them. With more clients P has no
spare time.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import openai

from bench.figures import Figure
from pointsman.router.v1 import fleet_pb2
from pointsman_router.core.policy.elastic import (
    BELOW_THRESHOLD,
    DECODE_IDLE,
    PREFILL_IDLE_DECODE_BUSY,
    PREFILL_OVERLOADED,
)
from tests.support.engines.model import words
from tests.support.engines.servers import ENGINE_PYTHON, MOONCAKE, SERVED_NAME, EngineSpec, make_model, running_engines
from tests.support.processes.control_plane import ControlPlane

HEAVY_TOKENS = 700
SHORT_TOKENS = 40
# Maximum tokens of a background answer.
LONG_ANSWER = 3_500
SETTINGS = {"heavy_new_tokens": 500}
# Number of clients -> HEAVY requests of each.
LOADS = {1: 16, 3: 8, 8: 5}
# HEAVY requests of the one client without background answers.
QUIET = 4

_seeds = count(1)


def elastic() -> list[Figure]:
    """Return the share of HEAVY requests offloaded by number of clients, and each reason's count; without a real engine one
    figure that says so."""
    if not ENGINE_PYTHON.exists():
        return [Figure("elastic_skipped", 1.0, "-", note="no real engine is installed: run `make env-engine`")]
    with tempfile.TemporaryDirectory(prefix="pointsman-elastic-") as folder, _plane(Path(folder)) as plane:
        with plane.client() as client:
            quiet = _decided(plane, client, 1, QUIET)
        seen = Counter(decision.reason for decision in quiet)
        figures = []
        for clients, each in LOADS.items():
            with plane.client() as client, _long_answers(client, len(plane.engines)):
                decisions = _decided(plane, client, clients, each)
            plane.wait_idle()
            seen += Counter(decision.reason for decision in decisions)
            figures.append(_share(decisions, clients))
    return figures + [
        Figure(f"elastic_{reason}", seen[reason], "decisions", note=f"of {seen.total()}, all loads")
        for reason in (PREFILL_IDLE_DECODE_BUSY, PREFILL_OVERLOADED, DECODE_IDLE, BELOW_THRESHOLD)
    ]


def _share(decisions: list[fleet_pb2.Decision], clients: int) -> Figure:
    heavy = [decision for decision in decisions if decision.reason != BELOW_THRESHOLD]
    failed = sum(decision.outcome != fleet_pb2.DECISION_OUTCOME_OK for decision in heavy)
    broken = sum(bool(decision.notes) for decision in heavy)
    share = sum(decision.mode == fleet_pb2.PLACEMENT_MODE_OFFLOAD for decision in heavy) / len(heavy)
    reasons = ", ".join(f"{reason} {n}" for reason, n in Counter(decision.reason for decision in heavy).most_common())
    note = f"of {len(heavy)} HEAVY on two real vLLM: {reasons}; {broken} fell back, {failed} failed"
    return Figure(f"elastic_offloaded_{clients}", share, "share", note=note)


@contextlib.contextmanager
def _plane(folder: Path) -> Iterator[ControlPlane]:
    """Run a control plane with two engines that transfer KV to each other."""
    specs = [EngineSpec(name, kv_transfer=MOONCAKE) for name in ("p", "d")]
    flags = {"--policy": "elastic", "--policy-settings": json.dumps(SETTINGS)}
    with (
        running_engines(specs, make_model(folder / "model"), folder) as engines,
        ControlPlane(engines, folder, router_flags=flags).running() as plane,
    ):
        yield plane


def _decided(plane: ControlPlane, client: openai.OpenAI, clients: int, each: int) -> list[fleet_pb2.Decision]:
    """Send `each` HEAVY prompts and as many short ones from each of `clients` concurrent clients; return the decisions."""

    def ask(_: int) -> list[str]:
        sizes = [HEAVY_TOKENS, SHORT_TOKENS] * each
        return [_complete(client, words(size, next(_seeds))) for size in sizes]

    with ThreadPoolExecutor(clients) as threads:
        made = [decision_id for ids in threads.map(ask, range(clients)) for decision_id in ids]
    return [plane.finished_decision(decision_id) for decision_id in made]


def _complete(client: openai.OpenAI, prompt: str) -> str:
    """Request a short answer; return the decision's id."""
    raw = client.completions.with_raw_response.create(model=SERVED_NAME, prompt=prompt, max_tokens=4, temperature=0)
    return raw.headers["X-Pointsman-Decision"]


@contextlib.contextmanager
def _long_answers(client: openai.OpenAI, streams: int) -> Iterator[None]:
    """Keep `streams` long answers in flight inside the block. The router places them on the least loaded instances."""
    over = threading.Event()
    begun = threading.Semaphore(0)

    def stream() -> None:
        while not over.is_set():
            prompt = words(SHORT_TOKENS, next(_seeds))
            asked = client.completions.create(
                model=SERVED_NAME, prompt=prompt, max_tokens=LONG_ANSWER, temperature=0, stream=True
            )
            with asked as chunks:
                for at, _ in enumerate(chunks):
                    if at == 0:
                        begun.release()
                    if over.is_set():
                        return

    with ThreadPoolExecutor(streams) as threads:
        running = [threads.submit(stream) for _ in range(streams)]
        try:
            for _ in range(streams):
                begun.acquire()
            yield
        finally:
            over.set()
        for answer in running:
            answer.result()
