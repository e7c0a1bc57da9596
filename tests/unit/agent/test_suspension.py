"""Which engines compute nothing, and when their caches were reset, from vLLM's metrics page."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.engine_metrics import NAMES, Scrape, parse_metrics
from pointsman_agent.core.step_load import StepLoad, StepTotals
from pointsman_agent.core.suspension import CacheResets, Reset, suspension

# A page of vLLM 0.32 (tests/unit/agent/vllm_metrics.txt) with the state that PrometheusStatLogger.record_sleep_state writes, and
# the operations as vllm/entrypoints/serve/dev/sleep/metrics.py and entrypoints/rl/online/metrics.py print them.
PAGE = Path(__file__).with_name("vllm_metrics.txt").read_text()
STATES = ("awake", "weights_offloaded", "discard_all")
AWAKE, LEVEL_0, LEVEL_1, LEVEL_2 = (1, 0, 0), (0, 0, 0), (0, 1, 0), (0, 0, 1)
KINDS = {"sleep": "sleep_mode", "wake": "sleep_mode", "release_kv_cache_memory": "sleep_mode"}


def page(
    state: tuple[int, int, int] = AWAKE, *, completed: dict[str, int] | None = None, in_flight: str = ""
) -> Scrape:
    text = PAGE
    for name, before, value in zip(STATES, AWAKE, state, strict=True):
        line = f'vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="{name}"}}'
        assert f"{line} {before}.0" in text
        text = text.replace(f"{line} {before}.0", f"{line} {value}.0")
    for operation, count in (completed or {}).items():
        metric = f"vllm:{KINDS.get(operation, 'rl_weight_update')}_operation_duration_seconds"
        text += f'{metric}_bucket{{le="0.01",operation="{operation}"}} 0.0\n'
        text += f'{metric}_count{{operation="{operation}"}} {count}.0\n'
        text += f'{metric}_sum{{operation="{operation}"}} 0.5\n'
    if in_flight:
        metric = f"vllm:{KINDS.get(in_flight, 'rl_weight_update')}_operations_in_flight"
        text += f'{metric}{{operation="{in_flight}"}} 1.0\n{metric}{{operation="wake"}} 0.0\n'
    scrape = parse_metrics(text.encode())
    assert list(scrape.ranks) == [0], "the series of the process are of no rank"
    return scrape


def reason(scrape: Scrape, *, paused: bool = False) -> str:
    return suspension(scrape.ranks[0], scrape, paused=paused)


@pytest.mark.parametrize(
    ("scrape", "paused", "expected"),
    [
        (page(), False, ""),
        (page(completed={"sleep": 3, "wake": 3, "update": 2}), False, ""),
        (page(LEVEL_0), True, "asleep (its scheduler is paused)"),
        (page(LEVEL_1), True, "asleep (level 1: weights are in host memory, the KV cache is discarded)"),
        (page(LEVEL_2), True, "asleep (level 2: weights and KV cache are discarded)"),
        (page(in_flight="sleep"), False, "falling asleep"),
        (page(in_flight="update"), False, "its weights are being changed"),
        (page(in_flight="init"), False, ""),
        (page(), True, "paused"),
    ],
)
def test_what_suspends_an_engine(scrape: Scrape, paused: bool, expected: str) -> None:
    assert reason(scrape, paused=paused) == expected


def test_an_engine_without_sleep_metrics_is_awake() -> None:
    scrape = parse_metrics(b'vllm:num_requests_running{engine="0"} 0.0\n')
    assert reason(scrape) == ""
    assert CacheResets().observe(scrape, paused=False) is None


def test_the_ranks_of_an_engine_sleep_each() -> None:
    scrape = parse_metrics(
        b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n'
        b'vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0.0\n'
    )
    assert [bool(suspension(scrape.ranks[rank], scrape, paused=False)) for rank in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("before", "after", "paused", "reset"),
    [
        (page(), page(), False, False),
        (page(), page(LEVEL_1, completed={"sleep": 1}), True, True),
        (page(LEVEL_1, completed={"sleep": 1}), page(completed={"sleep": 1, "wake": 1}), False, False),
        # A sleep that ended between two scrapes is only counted, without its level.
        (page(), page(completed={"sleep": 1, "wake": 1}), False, True),
        (page(completed={"sleep": 1}), page(completed={"sleep": 1, "wake": 1}), False, False),
        # Level 0 keeps the cache; release_kv_cache_memory shows the same state and discards it.
        (page(), page(LEVEL_0, completed={"sleep": 1}), True, False),
        (page(), page(LEVEL_0, completed={"release_kv_cache_memory": 1}), True, True),
        (page(LEVEL_0, completed={"sleep": 1}), page(completed={"sleep": 1, "wake": 1}), False, False),
        (page(completed={"update": 4}), page(completed={"update": 5}), False, True),
        (page(completed={"init": 4}), page(completed={"init": 5}), False, False),
    ],
)
def test_resets_that_no_event_tells_yet(before: Scrape, after: Scrape, paused: bool, reset: bool) -> None:
    resets = CacheResets()
    resets.observe(before, paused=False)
    assert bool(resets.observe(after, paused=paused)) is reset


@pytest.mark.parametrize(
    ("pages", "resets"),
    [
        # (what a scrape shows, whether the engine then says that it is paused): whether a reset is reported.
        (((page(), True), (page(), True), (page(), True)), [False, True, True]),
        (((page(), True), (page(), False), (page(), False)), [False, True, False]),
        # It falls asleep between the scrape and the answer, and wakes up between a late answer and the scrape.
        (((page(), True), (page(LEVEL_0, completed={"sleep": 1}), True)), [False, False]),
        (((page(), True), (page(in_flight="sleep"), True), (page(LEVEL_0, completed={"sleep": 1}), True)), [False] * 3),
        (
            ((page(LEVEL_0), True), (page(completed={"wake": 1}), True), (page(completed={"wake": 1}), False)),
            [False] * 3,
        ),
        (((page(), True), (page(LEVEL_1, completed={"sleep": 1}), True)), [False, True]),
    ],
)
def test_a_pause_is_known_from_two_scrapes(pages: tuple[tuple[Scrape, bool], ...], resets: list[bool]) -> None:
    observer = CacheResets()
    observer.observe(page(), paused=False)
    assert [bool(observer.observe(scrape, paused=paused)) for scrape, paused in pages] == resets


def test_what_happened_before_the_first_scrape_is_no_reset() -> None:
    assert CacheResets().observe(page(completed={"sleep": 5, "update": 7}), paused=False) is None
    assert CacheResets().observe(page(LEVEL_2), paused=True) == Reset("the engine is asleep", over=False)


def test_the_sleep_series_are_requested() -> None:
    assert {
        "vllm:engine_sleep_state",
        "vllm:sleep_mode_operations_in_flight",
        "vllm:rl_weight_update_operation_duration_seconds_count",
    } <= set(NAMES)


def test_a_pushed_load_is_suspended_as_the_last_scrape_says() -> None:
    pushed = StepLoad("7f", 0, 0, 2, 0.5, 0, StepTotals(0, 0.0, 0, 0, 0, 0, 0.0))
    assert pushed.to_wire(pb.Load(suspended="paused", generation_tokens=9)).suspended == "paused"
    assert pushed.to_wire(None).suspended == ""


def test_a_count_that_is_no_number_for_a_while_is_no_reset() -> None:
    resets = CacheResets()
    pages = [page(completed={"update": 2}), page(), page(completed={"update": 2}), page(completed={"update": 3})]
    assert [resets.observe(scrape, paused=False) for scrape in pages] == [
        None,
        None,
        None,
        Reset("the engine's weights were changed", over=True),
    ]
