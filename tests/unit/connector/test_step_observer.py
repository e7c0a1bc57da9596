"""What is reported of an engine's steps, from a scheduler's outputs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pointsman_connector.step_observer import MAX_STEPS_AHEAD, StepObserver, kv_usage, missing_parts


class Scheduler:
    """What is read of a vLLM scheduler: the requests, whose tokens a step adds when it is scheduled."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.observer = StepObserver()

    def schedule(
        self,
        began: float = 0.0,
        new: dict[str, tuple[int, int]] | None = None,
        resumed: dict[str, int] | None = None,
        finished: tuple[str, ...] = (),
        preempted: tuple[str, ...] | None = None,
        **amounts: int,
    ) -> Any:
        """`new`: request -> (prompt's tokens, of which cached); `resumed`, `amounts`: request -> tokens."""
        for name, (tokens, cached) in (new or {}).items():
            self.requests[name] = SimpleNamespace(num_tokens=tokens, num_computed_tokens=cached)
        for name, tokens in (resumed or {}).items():
            self.requests[name] = SimpleNamespace(num_tokens=tokens, num_computed_tokens=0)
        for name, amount in amounts.items():
            self.requests[name].num_computed_tokens += amount
        output = SimpleNamespace(
            finished_req_ids=set(finished),
            preempted_req_ids=None if preempted is None else set(preempted),
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new or {}],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed or {})),
            num_scheduled_tokens=amounts,
            total_num_scheduled_tokens=sum(amounts.values()),
        )
        self.computes_prompt = self.observer.scheduled(self, output, began)
        return output

    @property
    def figures(self) -> tuple[int, int, int, int, int]:
        totals = self.observer.totals
        return totals.steps, totals.decode_tokens, totals.prefill_tokens, totals.prefill_pairs, totals.prefills


def test_a_prompt_in_chunks_beside_answers() -> None:
    one = Scheduler()
    first = one.schedule(0.0, new={"a": (100, 20)}, a=50)
    assert one.computes_prompt, "the step computes a prompt"
    assert one.observer.prefill_tokens_left == 30
    one.observer.computed(first, 1.0)
    assert one.figures == (1, 0, 50, 50 * (40 + 50), 0)
    second = one.schedule(1.0, new={"b": (10, 0)}, a=30, b=10)
    assert one.observer.prefill_tokens_left == 0
    one.observer.computed(second, 1.5)
    assert one.figures == (2, 0, 90, 4_500 + 30 * (140 + 30) + 100, 2)
    third = one.schedule(1.5, a=1, b=1)
    assert not one.computes_prompt
    one.observer.computed(third, 1.6)
    assert one.figures == (3, 2, 90, 9_700, 2)
    assert one.observer.totals.seconds == pytest.approx(1.6)
    assert one.observer.totals.prefill_seconds == pytest.approx(1.5)


def test_a_step_that_is_scheduled_ahead_begins_when_the_one_before_ends() -> None:
    """As with async scheduling: the second step is scheduled while the first is computed."""
    one = Scheduler()
    first = one.schedule(0.0, new={"a": (100, 0)}, a=60)
    second = one.schedule(0.1, a=40)
    one.observer.computed(first, 1.0)
    one.observer.computed(second, 1.7)
    assert one.observer.totals.seconds == pytest.approx(1.7)
    idle = one.schedule(5.0, a=1)
    one.observer.computed(idle, 5.2)
    assert one.observer.totals.seconds == pytest.approx(1.9), "pauses do not count"


def test_preempted_aborted_and_resumed_prompts() -> None:
    one = Scheduler()
    one.schedule(new={"a": (100, 0), "b": (80, 0)}, a=50, b=10)
    assert one.observer.prefill_tokens_left == 50 + 70
    one.schedule(preempted=("b",), a=20)
    assert one.observer.prefill_tokens_left == 30
    one.schedule(finished=("a",), resumed={"b": 85}, b=40)
    assert one.observer.prefill_tokens_left == 45
    del one.requests["b"]
    one.schedule()
    assert one.observer.prefill_tokens_left == 0


def test_steps_that_are_never_computed_are_forgotten() -> None:
    one = Scheduler()
    one.schedule(new={"a": (100, 0)}, a=50)
    last = one.schedule(1.0, a=50)
    assert one.observer.computed(last, 2.0)
    assert one.figures[0] == 1
    assert not one.observer.computed(object(), 3.0)
    for _ in range(3 * MAX_STEPS_AHEAD):
        one.schedule(a=1)
    assert len(one.observer._ahead) == MAX_STEPS_AHEAD


def test_a_step_without_tokens_is_no_step() -> None:
    one = Scheduler()
    assert not one.observer.computed(one.schedule(), 1.0)
    assert one.figures[0] == 0


def test_what_a_scheduler_lacks() -> None:
    assert missing_parts(SimpleNamespace(schedule=1, requests={})) == [
        "update_from_output",
        "get_request_counts",
        "get_kv_cache_usage",
    ]


def test_a_scheduler_may_tell_its_caches_usage_at_its_manager() -> None:
    """As vLLM 0.22 and 0.26 do."""
    parts = {"schedule": 1, "update_from_output": 1, "get_request_counts": 1, "requests": {}}
    older = SimpleNamespace(**parts, kv_cache_manager=SimpleNamespace(usage=0.25))
    assert (missing_parts(older), kv_usage(older)) == ([], 0.25)
    newer = SimpleNamespace(**vars(older), get_kv_cache_usage=lambda: 0.5)
    assert (missing_parts(newer), kv_usage(newer)) == ([], 0.5)
