"""The engine model: small schedules computed by hand, and what must hold for every schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman_lab.engine.block_cache import AllCleared, BlocksRemoved, BlocksStored
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.interface import (
    EngineConfig,
    EngineRequest,
    Event,
    Finished,
    FirstToken,
    Preempted,
    StepResult,
    TokenGenerated,
    WaitingForRemoteKv,
)
from pointsman_lab.engine.model import EngineModel

# Round numbers, so that durations can be computed in the head.
PLAIN = Profile(step_s=1.0, prefill_token_s=0.1, prefill_pair_s=0.0, decode_sequence_s=0.01, decode_kv_token_s=0.001)


def engine(**changes: Any) -> EngineModel:
    settings: dict[str, Any] = {
        "kv_blocks": 64,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "vocabulary": range(500, 600),
    }
    return EngineModel(EngineConfig(**(settings | changes)), PLAIN)


def ask(name: str, prompt: list[int], max_tokens: int = 4, **more: Any) -> EngineRequest:
    return EngineRequest(name, prompt, max_tokens, **more)


def run_out(model: EngineModel, limit: int = 10_000) -> list[StepResult]:
    steps = []
    now = 0.0
    while model.has_work:
        steps.append(model.step(now))
        now += steps[-1].duration_s
        for awaited in steps[-1].awaited:
            assert model.receive(awaited.request_id, now)
        model.finish_step()
        model.cache.check()
        assert len(steps) < limit, "the engine does not come to an end"
    return steps


def events_of(steps: list[StepResult], kind: type[Any]) -> list[Any]:
    return [event for step in steps for event in step.events if isinstance(event, kind)]


def answer(steps: list[StepResult], name: str) -> list[int]:
    return [event.token_id for event in events_of(steps, TokenGenerated) if event.request_id == name]


def test_the_first_step_after_there_was_nothing_to_do_takes_longer() -> None:
    model = EngineModel(EngineConfig(kv_blocks=64, max_model_len=512), replace(PLAIN, wake_s=5.0))
    model.submit(ask("a", list(range(100)), max_tokens=2), 0.0)
    first = model.step(0.0)
    # b comes while the engine works, and is decoded when no other request is left.
    model.submit(ask("b", list(range(200, 210)), max_tokens=2), 1.0)
    steps = [first, *run_out(model)]
    assert [step.duration_s for step in steps] == pytest.approx([5.0 + 11.0, 1.0 + 0.11 + 1.0, 1.02])
    model.submit(ask("c", list(range(300, 310)), max_tokens=1), 9.0)
    assert model.decode_only_steps() is None
    assert [step.duration_s for step in run_out(model)] == pytest.approx([5.0 + 2.0])
    # A request that waits for remote KV is no work yet: the step after it takes the longer time.
    model.submit(ask("d", list(range(400, 432)), max_tokens=1, remote_tokens=32), 20.0)
    assert [step.duration_s for step in run_out(model)] == pytest.approx([0.0, 5.0 + 1.0 + 0.01 + 0.031])


def test_a_prompt_is_cut_into_chunks_and_then_decoded() -> None:
    model = engine()
    model.submit(ask("a", list(range(100)), max_tokens=3), 0.0)
    steps = run_out(model)
    assert [step.scheduled for step in steps] == [{"a": 64}, {"a": 36}, {"a": 1}, {"a": 1}]
    # Two chunks at 0.1 s a token; then tokens 101 and 102, which read 100 and 101 tokens of KV.
    assert [round(step.duration_s, 6) for step in steps] == [7.4, 4.6, 1.11, 1.111]
    assert events_of(steps, FirstToken) == [FirstToken("a", 0, 0)]
    assert events_of(steps[1:2], FirstToken)
    assert events_of(steps, Finished) == [Finished("a", "length")]
    assert model.num_running == model.num_waiting == 0
    assert model.kv_usage == 0


def test_running_requests_come_before_waiting_ones_and_share_the_budget() -> None:
    model = engine()
    model.submit(ask("a", list(range(40)), max_tokens=3), 0.0)
    first = model.step(0.0)
    model.submit(ask("b", list(range(1000, 1100)), max_tokens=1), 0.0)
    rest = run_out(model)
    assert first.scheduled == {"a": 40}
    assert [step.scheduled for step in rest] == [{"a": 1, "b": 63}, {"a": 1, "b": 37}]


def test_a_long_prefill_threshold_counts_only_beside_others() -> None:
    alone = engine(long_prefill_token_threshold=16)
    alone.submit(ask("a", list(range(48)), max_tokens=1), 0.0)
    assert alone.step(0.0).scheduled == {"a": 48}
    beside = engine(long_prefill_token_threshold=16)
    beside.submit(ask("a", list(range(48)), max_tokens=1), 0.0)
    beside.submit(ask("b", list(range(100, 110)), max_tokens=1), 0.0)
    assert beside.step(0.0).scheduled == {"a": 16, "b": 10}
    # b has finished, so a is alone again.
    assert beside.step(0.0).scheduled == {"a": 32}


def test_max_num_seqs_and_first_come_first_served() -> None:
    model = engine(max_num_seqs=1)
    model.submit(ask("a", list(range(10)), max_tokens=2), 0.0)
    model.submit(ask("b", list(range(10)), max_tokens=1), 0.0)
    assert [step.scheduled for step in run_out(model)] == [{"a": 10}, {"a": 1}, {"b": 10}]


def test_a_hit_is_full_blocks_and_stops_before_the_last_token() -> None:
    model = engine()
    prompt = list(range(48))
    model.submit(ask("a", prompt, max_tokens=1), 0.0)
    model.step(0.0)
    for name, asked, cached in (
        ("b", prompt, 32),
        ("c", [*prompt, 7], 48),
        ("d", prompt[:40], 32),
        ("e", [9, *prompt], 0),
    ):
        model.submit(ask(name, asked, max_tokens=1), 0.0)
        assert events_of([model.step(0.0)], FirstToken) == [FirstToken(name, cached, 0)]
    assert model.counters.prefix_cache_hits == 32 + 48 + 32
    assert model.counters.prefix_cache_queries == 48 + 48 + 49 + 40 + 49


def test_blocks_are_published_with_parents_and_generated_tokens_are_cached() -> None:
    model = engine()
    model.submit(ask("a", list(range(20)), max_tokens=16, session_id="s"), 0.0)
    steps = run_out(model)
    stored = events_of(steps, BlocksStored)
    tokens = [*range(20), *answer(steps, "a")]
    assert [event.token_ids for event in stored] == [tuple(tokens[:16]), tuple(tokens[16:32])]
    assert [event.parent for event in stored] == [None, stored[0].hashes[0]]
    assert {event.session_id for event in stored} == {"s"}
    # Token 36, the last one, was never computed, so the follow-up hits its 32 full computed tokens.
    model.submit(ask("b", tokens, max_tokens=1), 0.0)
    assert events_of(run_out(model), FirstToken) == [FirstToken("b", 32, 0)]


def test_the_same_block_computed_at_once_is_stored_twice_and_removed_twice() -> None:
    model = engine(kv_blocks=4, max_model_len=64, max_num_batched_tokens=16)
    prompt = list(range(16))
    model.submit(ask("a", prompt, max_tokens=1), 0.0)
    model.step(0.0)
    # A prompt of exactly one block must be computed again for its last token: a second physical block of that hash.
    model.submit(ask("b", prompt, max_tokens=1), 0.0)
    stored = events_of([model.step(0.0)], BlocksStored)
    assert model.cache.cached_hashes() == {stored[0].hashes[0]: 2}
    model.submit(ask("c", list(range(100, 160)), max_tokens=4), 0.0)
    removed = [value for event in events_of(run_out(model), BlocksRemoved) for value in event.hashes]
    assert removed == [stored[0].hashes[0]] * 2


def test_least_recently_used_blocks_go_first_and_tails_before_heads() -> None:
    model = engine(kv_blocks=4, max_model_len=64)
    prompts = {name: list(range(start, start + 32)) for name, start in (("a", 0), ("b", 100))}
    hashes = {}
    for name, prompt in prompts.items():
        model.submit(ask(name, prompt, max_tokens=1), 0.0)
        hashes[name] = events_of([model.step(0.0)], BlocksStored)[0].hashes
    model.submit(ask("c", list(range(200, 216)), max_tokens=1), 0.0)
    assert events_of([model.step(0.0)], BlocksRemoved) == [BlocksRemoved((hashes["a"][1],))]


def test_preemption_takes_the_last_admitted_and_recomputes_it() -> None:
    model = engine(kv_blocks=4, max_model_len=64)
    model.submit(ask("a", list(range(30)), max_tokens=8), 0.0)
    model.submit(ask("b", list(range(100, 130)), max_tokens=8), 0.0)
    steps = run_out(model)
    assert events_of(steps, Preempted) == [Preempted("b")]
    assert model.counters.num_preemptions == 1
    # 32 tokens fill two blocks each; the 33rd of a takes one of b's.
    assert [step.scheduled for step in steps[:4]] == [{"a": 30, "b": 30}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1}]
    assert [event.request_id for event in events_of(steps, Finished)] == ["a", "b"]
    assert len(answer(steps, "b")) == 8
    alone = engine()
    alone.submit(ask("b", list(range(100, 130)), max_tokens=8), 0.0)
    assert answer(run_out(alone), "b") == answer(steps, "b")


def test_a_waiting_request_whose_prompt_does_not_fit_waits() -> None:
    model = engine(kv_blocks=4, max_model_len=64)
    model.submit(ask("a", list(range(33)), max_tokens=2), 0.0)
    model.submit(ask("b", list(range(100, 120)), max_tokens=1), 0.0)
    assert [step.scheduled for step in run_out(model)] == [{"a": 33}, {"a": 1}, {"b": 20}]


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    model = engine(kv_blocks=4, max_model_len=64)
    for name, start, length in (("a", 0, 30), ("b", 100, 30), ("c", 200, 5)):
        model.submit(ask(name, list(range(start, start + length)), max_tokens=8), 0.0)
    steps = run_out(model)
    lost = next(number for number, step in enumerate(steps) if Preempted("b") in step.events)
    # c would fit beside a, but b heads the queue.
    assert list(dict.fromkeys(name for step in steps[lost:] for name in step.scheduled)) == ["a", "b", "c"]


def test_cached_blocks_that_nobody_holds_count_as_free_only_once() -> None:
    model = engine(kv_blocks=4, max_model_len=64)
    prompt = list(range(33))
    model.submit(ask("a", prompt, max_tokens=1), 0.0)
    run_out(model)
    model.submit(ask("b", list(range(100, 117)), max_tokens=3), 0.0)
    model.submit(ask("c", prompt, max_tokens=1), 0.0)
    # c's two cached blocks are the free ones, so its third block must wait for b's end.
    assert [step.scheduled for step in run_out(model)] == [{"b": 17}, {"b": 1}, {"b": 1}, {"c": 1}]


def test_abort_frees_everything_at_once() -> None:
    model = engine()
    model.submit(ask("a", list(range(100))), 0.0)
    model.submit(ask("b", list(range(100))), 0.0)
    model.step(0.0)
    assert model.num_running == 1
    assert model.kv_usage > 0
    assert model.abort("a", 0.0)
    assert model.abort("b", 0.0)
    assert not model.abort("a", 0.0)
    assert model.kv_usage == 0
    assert not model.has_work


def test_a_request_holds_its_blocks_until_its_last_step_is_over() -> None:
    model = engine()
    for name in ("a", "b"):
        model.submit(ask(name, list(range(64)), max_tokens=1), 0.0)
        assert events_of([model.step(0.0)], Finished) == [Finished(name, "length")]
        assert (model.num_running, model.has_work) == (1, True)
        assert model.kv_usage == 4 / 64
        if name == "a":
            model.finish_step()
        else:
            assert model.abort(name, 0.0)
        assert (model.num_running, model.has_work, model.kv_usage) == (0, False, 0.0)
        model.cache.check()


def test_kv_from_another_instance_leaves_one_token_to_compute() -> None:
    model = engine()
    model.submit(ask("a", list(range(100)), max_tokens=1, remote_tokens=100), 0.0)
    steps = run_out(model)
    assert steps[0] == StepResult(0.0, [], {}, (WaitingForRemoteKv("a", 100),))
    assert [step.scheduled for step in steps] == [{}, {"a": 1}]
    assert events_of(steps, FirstToken) == [FirstToken("a", 0, 100)]
    # As vLLM counts: what came is the whole prompt, though its last token was computed again.
    assert model.counters.external_kv_transfer == model.counters.external_prefix_cache_hits == 100
    assert model.counters.local_compute == 0
    assert sum(len(event.hashes) for event in events_of(steps, BlocksStored)) == 6


def test_kv_that_is_awaited_holds_blocks_while_others_compute() -> None:
    model = engine(kv_blocks=8, max_model_len=128)
    model.submit(ask("a", list(range(40)), max_tokens=9), 0.0)
    model.step(0.0)
    model.submit(ask("b", list(range(100, 164)), max_tokens=1, remote_tokens=64), 0.0)
    model.submit(ask("c", list(range(200, 230)), max_tokens=1), 0.0)
    step = model.step(0.0)
    # b takes four blocks at once and computes nothing; c, behind it, needs two where one is left.
    assert (step.scheduled, step.awaited) == ({"a": 1}, (WaitingForRemoteKv("b", 64),))
    assert (model.num_running, model.num_waiting, model.cache.free) == (1, 2, 1)
    assert model.step(0.0).scheduled == {"a": 1}
    assert model.receive("b", 0.0)
    assert not model.receive("b", 0.0)
    assert model.step(0.0).scheduled == {"a": 1, "b": 1}
    assert model.step(0.0).scheduled == {"a": 1, "c": 30}


def test_kv_that_has_come_goes_before_what_waits() -> None:
    model = engine(max_num_seqs=1)
    model.submit(ask("b", list(range(100, 164)), max_tokens=1, remote_tokens=64), 0.0)
    model.submit(ask("a", list(range(40)), max_tokens=2), 0.0)
    model.submit(ask("c", list(range(200, 230)), max_tokens=1), 0.0)
    assert model.step(0.0).scheduled == {"a": 40}
    model.receive("b", 0.0)
    assert [step.scheduled for step in run_out(model)] == [{"a": 1}, {"b": 1}, {"c": 30}]


def test_blocks_that_a_prompt_under_way_needs_are_not_given_to_kv_that_comes() -> None:
    model = engine(kv_blocks=12, max_model_len=128, max_num_batched_tokens=16)
    model.submit(ask("a", list(range(100)), max_tokens=1), 0.0)
    model.submit(ask("b", list(range(200, 296)), max_tokens=1, remote_tokens=96), 0.0)
    # a has one block of seven. Eleven are free, of which six are reserved for a, and b needs six.
    steps = [model.step(0.0) for _ in range(8)]
    assert [len(step.awaited) for step in steps] == [0] * 7 + [1]


def test_an_aborted_request_keeps_its_blocks_until_its_kv_has_come() -> None:
    model = engine()
    model.submit(ask("a", list(range(64)), remote_tokens=64), 0.0)
    model.step(0.0)
    assert not model.has_work
    assert model.abort("a", 0.0)
    assert model.kv_usage == 4 / 64
    with pytest.raises(ValueError, match="already in the engine"):
        model.submit(ask("a", [1]), 0.0)
    assert model.receive("a", 0.0)
    assert model.kv_usage == 0


def test_kv_that_came_is_computed_when_it_was_lost_to_a_preemption() -> None:
    model = engine(kv_blocks=4, max_model_len=64)
    model.submit(ask("a", list(range(30)), max_tokens=8), 0.0)
    model.submit(ask("b", list(range(100, 130)), max_tokens=8, remote_tokens=30), 0.0)
    steps = run_out(model)
    assert events_of(steps, Preempted) == [Preempted("b")]
    assert sum(len(step.awaited) for step in steps) == 1
    # Of its 32 tokens (two were answered) the first 16 were still there.
    again = [step.scheduled["b"] for step in steps if step.scheduled.get("b", 0) > 1]
    assert again == [16]
    assert model.counters.prefix_cache_queries == 60


def test_one_that_had_to_preempt_itself_goes_on() -> None:
    model = engine(kv_blocks=9, max_model_len=128, max_num_batched_tokens=3, max_num_seqs=2)
    model.submit(ask("a", [0] * 40 + [3] * 40, max_tokens=2), 0.0)
    for name in ("b", "c"):
        model.submit(ask(name, [0] * 40 + [2] * 9, max_tokens=1, remote_tokens=49), 0.0)
    steps = run_out(model)
    # a runs alone, and all other blocks are held for b and c: an empty step, then b and c, then a again.
    lost = next(number for number, step in enumerate(steps) if Preempted("a") in step.events)
    assert steps[lost].scheduled == {}
    assert [event.request_id for event in events_of(steps[lost:], Finished)] == ["b", "c", "a"]


def test_the_more_urgent_first_and_the_earlier_of_equals() -> None:
    model = engine(max_num_seqs=1, scheduling_policy="priority")
    for at, (name, priority) in enumerate((("a", 1), ("b", 0), ("c", 1), ("d", -1))):
        model.submit(ask(name, list(range(10)), max_tokens=1, priority=priority), float(at))
    assert [[*step.scheduled] for step in run_out(model)] == [["d"], ["b"], ["a"], ["c"]]


def test_without_the_policy_priorities_are_nothing() -> None:
    model = engine(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0)):
        model.submit(ask(name, list(range(10)), max_tokens=1, priority=priority), 0.0)
    assert [[*step.scheduled] for step in run_out(model)] == [["a"], ["b"]]


def test_the_least_urgent_is_preempted_and_gives_back_what_the_step_gave_it() -> None:
    model = engine(kv_blocks=4, max_model_len=64, scheduling_policy="priority")
    model.submit(ask("a", list(range(28)), max_tokens=8, priority=5), 0.0)
    model.submit(ask("b", list(range(100, 130)), max_tokens=8, priority=0), 1.0)
    steps = run_out(model)
    assert events_of(steps, Preempted) == [Preempted("a")]
    # Admitted in the order of priority; a, the last, would decode token 31 in the step in which b needs a third block.
    assert [step.scheduled for step in steps[:4]] == [{"b": 30, "a": 28}, {"b": 1, "a": 1}, {"b": 1, "a": 1}, {"b": 1}]
    first = engine(kv_blocks=4, max_model_len=64, scheduling_policy="priority")
    first.submit(ask("a", list(range(28)), max_tokens=8, priority=5), 0.0)
    first.step(0.0)
    first.submit(ask("b", list(range(100, 131)), max_tokens=8, priority=0), 1.0)
    steps = run_out(first)
    # Here a runs before b and is scheduled for this step already; its token is withdrawn.
    assert [step.scheduled for step in steps[:3]] == [{"a": 1, "b": 31}, {"a": 1, "b": 1}, {"b": 1}]
    assert events_of(steps[2:3], Preempted) == [Preempted("a")]


def test_an_adaptive_threshold_never_cuts_below_an_equal_share() -> None:
    for adaptive, scheduled in ((False, {"a": 16, "b": 16}), (True, {"a": 32, "b": 32})):
        model = engine(long_prefill_token_threshold=16, long_prefill_token_threshold_adaptive=adaptive)
        model.submit(ask("a", list(range(100)), max_tokens=1), 0.0)
        model.submit(ask("b", list(range(200, 300)), max_tokens=1), 0.0)
        assert model.step(0.0).scheduled == scheduled


def test_the_watermark_keeps_others_out_but_not_the_only_one() -> None:
    # 0.25 of vLLM's nine blocks, of which eight hold KV, are two.
    model = engine(kv_blocks=8, max_model_len=128, watermark=0.25)
    model.submit(ask("a", list(range(50)), max_tokens=2), 0.0)
    model.submit(ask("b", list(range(100, 148)), max_tokens=1), 0.0)
    model.submit(ask("c", list(range(200, 328 - 1)), max_tokens=1), 0.0)
    # a has four blocks; b would need three and leave one, fewer than the two. c takes all eight, alone.
    assert [step.scheduled for step in run_out(model)] == [{"a": 50}, {"a": 1}, {"b": 48}, {"c": 64}, {"c": 63}]


def test_an_answer_is_a_function_of_prompt_and_seed() -> None:
    def run(prompt: list[int], **changes: Any) -> list[int]:
        model = engine(eos_token_id=3, natural_length=(5, 9), **changes)
        model.submit(ask("a", prompt, max_tokens=100), 0.0)
        steps = run_out(model)
        assert events_of(steps, Finished) == [Finished("a", "stop")]
        return answer(steps, "a")

    first = run([1, 2, 3])
    assert first[-1] == 3
    assert 5 <= len(first) <= 9
    assert first == run([1, 2, 3], block_size=32, max_num_batched_tokens=2, hash_seed=9)
    assert first != run([1, 2, 4])
    assert first != run([1, 2, 3], seed=1)


def test_reset_prefix_cache_is_reported_with_the_next_step() -> None:
    model = engine()
    model.submit(ask("a", list(range(64)), max_tokens=2), 0.0)
    model.step(0.0)
    assert not model.reset_prefix_cache()
    run_out(model)
    assert model.reset_prefix_cache()
    assert model.cache.cached_hashes() == {}
    assert model.step(0.0) == StepResult(0.0, [AllCleared()], {})


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask("a", []), "0 tokens"),
        (ask("a", list(range(512))), "512 tokens"),
        (ask("a", [1], max_tokens=0), "at least 1"),
        (ask("there", [1]), "already in the engine"),
    ],
)
def test_impossible_requests_are_refused(request_: EngineRequest, reason: str) -> None:
    model = engine()
    model.submit(ask("there", [1]), 0.0)
    with pytest.raises(ValueError, match=reason):
        model.submit(request_, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 24},
        {"block_size": 8},
        {"kv_blocks": 31},
        {"max_num_seqs": 0},
        {"vocabulary": ()},
        {"watermark": 1.0},
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        engine(**changes)


def test_the_default_profile_has_the_reference_shape() -> None:
    for tokens, seconds in ((8192, 0.575), (16384, 1.495), (32768, 4.44), (65536, 15.2)):
        whole = Profile().chunk_s(tokens, 0)
        assert whole == pytest.approx(seconds, rel=0.04)
        chunks = sum(Profile().chunk_s(2048, done) for done in range(0, tokens, 2048))
        assert chunks == pytest.approx(whole)
    one = Profile().step_s + Profile().chunk_s(1, 30_000)
    assert 0.006 <= one <= 0.008


def rebuild(cache: Counter[int], events: list[Event]) -> None:
    """Apply events as a listener would."""
    for event in events:
        if isinstance(event, BlocksStored):
            assert event.parent is None or cache[event.parent], "the parent was never reported"
            assert len(event.token_ids) == 16 * len(event.hashes)
            cache.update(event.hashes)
        elif isinstance(event, BlocksRemoved):
            cache.subtract(event.hashes)
        elif isinstance(event, AllCleared):
            cache.clear()
    assert all(count >= 0 for count in cache.values())


SOME_PROMPTS = st.builds(
    lambda shared, own, length: ([shared] * 40 + [own] * 40)[:length],
    st.integers(0, 1),
    st.integers(2, 4),
    st.integers(1, 80),
)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), SOME_PROMPTS, st.integers(1, 30), st.integers(0, 60)),
    st.tuples(st.just("step")),
    st.tuples(st.just("abort"), st.integers(0, 10)),
    st.tuples(st.just("reset")),
)


@settings(max_examples=150)
@given(
    st.lists(ACTIONS, max_size=60),
    st.integers(8, 14),
    st.integers(1, 64),
    st.integers(1, 5),
    st.sampled_from([0, 8, 16]),
)
def test_whatever_happens(actions: list[tuple[Any, ...]], blocks: int, budget: int, seqs: int, threshold: int) -> None:
    """Blocks are conserved, every request finishes with what it asked for, and the events rebuild the cache."""
    model = engine(
        kv_blocks=blocks,
        max_model_len=128,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        long_prefill_token_threshold=threshold,
    )
    wanted: dict[str, int] = {}
    counts: Counter[int] = Counter()
    tokens: Counter[str] = Counter()
    ended: list[str] = []

    def step() -> None:
        result = model.step(0.0)
        for awaited in result.awaited:
            model.receive(awaited.request_id, 0.0)
        rebuild(counts, result.events)
        assert sum(result.scheduled.values()) <= budget
        assert len(result.scheduled) <= seqs
        assert (result.duration_s > 0) == bool(result.scheduled)
        tokens.update(event.request_id for event in result.events if isinstance(event, TokenGenerated))
        ended.extend(event.request_id for event in result.events if isinstance(event, Finished))
        assert {value: count for value, count in counts.items() if count} == model.cache.cached_hashes()

    for number, action in enumerate(actions):
        if action[0] == "submit":
            name = f"r{number}"
            model.submit(ask(name, action[1], max_tokens=action[2], remote_tokens=action[3]), 0.0)
            wanted[name] = min(action[2], 128 - len(action[1]))
        elif action[0] == "step":
            step()
        elif action[0] == "abort" and wanted:
            name = list(wanted)[action[1] % len(wanted)]
            if model.abort(name, 0.0):
                del wanted[name]
        elif action[0] == "reset" and model.reset_prefix_cache():
            step()
        model.cache.check()
    for _ in range(20_000):
        if not model.has_work:
            break
        step()
    assert not model.has_work
    assert model.cache.free == blocks
    assert {name: tokens[name] for name in wanted} == wanted
    assert set(wanted) <= set(ended)
    assert len(ended) == len(set(ended))
