"""Heavy prompts in slices on a real engine: small requests run between slices, the answer stays, the counters explain it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.chat_client import Answer, complete, fresh_words, prompt_tokens
from tests.support.engines.offloading import assert_same
from tests.support.engines.servers import Engine
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

HEAVY, SLICE, SMALL = 3_600, 1_024, 64
# A test's first slices come before costs are learned. With these settings all slices have SLICE tokens, and no request is held.
SETTINGS: dict[str, Any] = {
    "slice_factor": 1e-6,
    "slice_min_tokens": SLICE,
    "heavy_wait_factor": 1e6,
    "light_wait_factor": 1e6,
    "light_factor": 1e-3,
}


def counted(engine: Engine) -> tuple[float, float]:
    """Prompt tokens that the engine looked up in its cache, and those that it found."""
    return engine.metric("vllm:prefix_cache_queries_total"), engine.metric("vllm:prefix_cache_hits_total")


def test_small_requests_go_between_the_slices_of_a_heavy_one(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    """The engine is paused until all are placed on it, so that it sets the order: a slice, the small requests, the rest."""
    first, other = engines
    text = fresh_words(HEAVY)
    order: list[str] = []
    with plane.policy("foresight", **SETTINGS), plane.draining(other), ThreadPoolExecutor(6) as pool:
        # The mean work must be known before anything is heavy.
        complete(client, fresh_words(SMALL), max_tokens=1)
        plane.wait_idle()
        before = counted(first)
        sent: list[Future[Answer]] = []

        def ask(name: str, prompt: str) -> None:
            answer = pool.submit(complete, client, prompt, max_tokens=4)
            answer.add_done_callback(lambda _: order.append(name))
            sent.append(answer)

        with first.paused():
            ask("heavy", text)
            until(lambda: plane.instance(first).num_requests == 1, within_s=60, what="the heavy one is placed")
            for number in range(4):
                ask(f"small {number}", fresh_words(SMALL))
            until(lambda: plane.instance(first).num_requests == 5, within_s=60, what="the small ones are placed")
        heavy, *small = [future.result(timeout=120) for future in sent]

    assert order[-1] == "heavy", order
    assert prompt_tokens(heavy) == HEAVY
    plan = plane.plan(heavy.decision_id)
    slices = (HEAVY - SLICE // 4) // SLICE
    assert [decision.reason for decision in plan] == ["slice"] * slices + ["last_part"]
    assert [decision.steps[0].prefix_tokens for decision in plan] == [
        SLICE * number for number in range(1, slices + 1)
    ] + [0]
    assert [decision.cached_tokens for decision in plan] == [SLICE * number for number in range(slices + 1)]
    assert {decision.outcome for decision in plan} == {fleet_pb2.DECISION_OUTCOME_OK}
    assert [plane.decision(answer.decision_id).reason for answer in small] == ["last_part"] * 4

    # Each slice found those before it, and the answer found them all, which is no cache hit; the small ones found nothing.
    plane.wait_idle()
    assert heavy.cached_tokens == 0
    queries, hits = (now - was for now, was in zip(counted(first), before, strict=True))
    assert hits == sum(SLICE * number for number in range(slices)) + slices * SLICE
    assert queries == sum(SLICE * number for number in range(1, slices + 1)) + HEAVY + 4 * SMALL

    assert_same(other, text, heavy.text, 4)
