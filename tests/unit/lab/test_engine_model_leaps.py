"""Many decode steps taken as one event must equal the same steps taken one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman_lab.engine.block_cache import BlocksRemoved, BlocksStored
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.interface import DecodeSteps, EngineConfig, EngineRequest, Finished, FirstToken
from pointsman_lab.engine.model import EngineModel
from pointsman_lab.engine.prompt_content import NamedPrompt

PROFILE = Profile(step_s=1.0, prefill_token_s=0.1, prefill_pair_s=0.0, decode_sequence_s=0.01, decode_kv_token_s=0.001)


def engine(blocks: int = 24, **changes: Any) -> EngineModel:
    return EngineModel(EngineConfig(kv_blocks=blocks, max_model_len=256, max_num_batched_tokens=64, **changes), PROFILE)


def ask(number: int, shared: int, length: int, output: int) -> EngineRequest:
    names = [*range(1, shared + 1), *range(1_000 * number, 1_000 * number + 100)][: length // 16]
    answer = range(1_000 * number + 500, 1_000 * number + 600)
    return EngineRequest(f"r{number}", NamedPrompt(length, names, answer), output)


def play(model: EngineModel, asked: list[tuple[float, EngineRequest]], *, leaps: bool) -> tuple[list[Any], int]:
    """Return (event, time) of the answers and the block events, and how often the model ran."""
    now, turns, waiting, answers = 0.0, 0, list(asked), []
    stored: list[tuple[int, ...]] = []
    while waiting or model.has_work:
        if not model.has_work:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            model.submit(waiting.pop(0)[1], now)
        decode = model.decode_only_steps() if leaps else None
        if decode is None:
            result = model.step(now)
            now, events = now + result.duration_s, result.events
        else:
            steps = decode.steps_by(waiting[0][0] - now) if waiting else decode.steps
            now += decode.seconds(steps)
            events = model.finish_decode_steps(steps, now)
        model.finish_step()
        model.cache.check()
        turns += 1
        answers += [(event, round(now, 6)) for event in events if isinstance(event, FirstToken | Finished)]
        stored += [event.hashes for event in events if isinstance(event, BlocksStored | BlocksRemoved)]
    return [answers, sorted(value for hashes in stored for value in hashes), model.counters], turns


@settings(max_examples=200)
@given(
    requests=st.lists(
        st.tuples(
            st.floats(0, 20).map(lambda value: round(value, 3)),
            st.integers(0, 4),
            st.integers(1, 120),
            st.integers(1, 80),
        ),
        min_size=1,
        max_size=8,
    ),
    seqs=st.integers(1, 4),
)
def test_leaps_are_steps(requests: list[tuple[float, int, int, int]], seqs: int) -> None:
    def asked() -> list[tuple[float, EngineRequest]]:
        # Arrivals are shifted off the whole milliseconds of steps, so that none coincides with a step's end.
        made = [(at + number * 1e-5, ask(number, *rest)) for number, (at, *rest) in enumerate(requests, 1)]
        return sorted(made, key=lambda one: one[0])

    stepped, steps = play(engine(max_num_seqs=seqs), asked(), leaps=False)
    leapt, turns = play(engine(max_num_seqs=seqs), asked(), leaps=True)
    assert leapt == stepped
    assert turns <= steps


def test_a_lone_answer_is_one_leap() -> None:
    model = engine()
    model.submit(ask(1, 0, 40, 100), 0.0)
    assert model.decode_only_steps() is None
    model.step(0.0)
    decode = model.decode_only_steps()
    # 99 tokens; the first reads 40 tokens of KV.
    assert decode is not None
    assert decode == DecodeSteps(99, evicts=False, first_s=decode.first_s, growth_s=0.001)
    assert decode.first_s == pytest.approx(1.05)
    assert decode.seconds(3) == pytest.approx(1.05 + 1.051 + 1.052)
    assert [decode.steps_by(at) for at in (0.0, 1.0, 1.06, 2.2, 1e9)] == [1, 1, 2, 3, 99]
    assert model.kv_usage_after(99) == pytest.approx(9 / 24)
    events = model.finish_decode_steps(99, 1e3)
    model.finish_step()
    assert [event for event in events if isinstance(event, Finished)] == [Finished("r1", "length")]
    assert not model.has_work


@given(
    steps=st.integers(1, 300),
    first_s=st.floats(1e-6, 1.0),
    growth_s=st.one_of(st.just(0.0), st.floats(1e-9, 0.1)),
    share=st.floats(0, 1.5),
)
def test_steps_by_are_those_that_have_begun(steps: int, first_s: float, growth_s: float, share: float) -> None:
    decode = DecodeSteps(steps, evicts=False, first_s=first_s, growth_s=growth_s)
    for at in (share * decode.seconds(steps), decode.seconds(round(min(share, 1) * steps))):
        assert decode.steps_by(at) == next((n for n in range(1, steps) if decode.seconds(n) >= at), steps)


def test_what_cannot_be_leapt_over() -> None:
    model = engine(blocks=16)
    model.submit(ask(1, 0, 40, 200), 0.0)
    model.step(0.0)
    model.submit(ask(2, 0, 40, 2), 0.0)
    assert model.decode_only_steps() is None, "a request can be admitted"
    model.step(0.0)
    model.submit(ask(3, 0, 230, 2), 0.0)
    decode = model.decode_only_steps()
    assert decode is not None, "a request that does not fit does not prevent it"
    assert decode.steps == 1, "the shorter answer ends"
