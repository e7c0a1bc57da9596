"""The host tier and shared storage of the engine model: eviction by a plain list, times by hand, and what must always hold."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.host_tier import HOST, STORAGE, HostTier, Offer, OffloadedRemoved, OffloadedStored
from pointsman_lab.engine.interface import EngineConfig, EngineRequest, Event, Finished, FirstToken
from pointsman_lab.engine.model import EngineModel
from pointsman_lab.engine.prompt_content import NamedPrompt
from tests.support.lab_values import PLAIN

# A transfer of host memory takes 0.1 s and 0.01 s per block, one of storage 1 s and 0.1 s per block.
COSTS = replace(PLAIN, host_s=0.1, host_token_s=0.01 / 16, storage_s=1.0, storage_token_s=0.1 / 16)
QUICK = replace(PLAIN, host_s=1e-7, host_token_s=0.0)
BLOCKS = st.lists(st.integers(0, 30), max_size=9, unique=True)


class EvictsTheLeastRecentlyUsed(RuleBasedStateMachine):
    """The tier against a list of blocks, the least recently used one first."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(12)
        self.order: list[int] = []
        self.writing: set[int] = set()
        self.readers: list[list[int]] = []

    def idle(self, block: int) -> bool:
        return block not in self.writing and not any(block in reader for reader in self.readers)

    @rule(blocks=BLOCKS)
    def offer(self, blocks: list[int]) -> None:
        write = [block for block in blocks if block not in self.order]
        missing = max(len(self.order) + len(write) - 12, 0)
        evictable = [block for block in self.order if self.idle(block) and block not in blocks]
        ready = tuple(block for block in blocks if block in self.order and block not in self.writing)
        expected = Offer(tuple(write), ready, accepted=False)
        if missing <= len(evictable):
            expected = Offer(tuple(write), ready, tuple(evictable[:missing]))
            self.order = [block for block in self.order if block not in evictable[:missing]] + write
            self.writing.update(write)
        assert self.tier.offer(blocks) == expected

    @rule(blocks=BLOCKS)
    def written(self, blocks: list[int]) -> None:
        done = self.writing.intersection(blocks)
        self.tier.written(done)
        self.writing -= done

    @rule(blocks=BLOCKS)
    def read(self, blocks: list[int]) -> None:
        readable = [block for block in blocks if block in self.order and block not in self.writing]
        self.tier.pin(readable)
        self.readers.append(readable)

    @rule(number=st.integers(0, 9))
    def was_read(self, number: int) -> None:
        if self.readers:
            self.tier.unpin(self.readers.pop(number % len(self.readers)))

    @rule(blocks=BLOCKS)
    def use(self, blocks: list[int]) -> None:
        self.tier.use(blocks)
        for block in blocks:
            if block in self.order:
                self.order.remove(block)
                self.order.append(block)

    @rule(blocks=BLOCKS)
    def lookup(self, blocks: list[int]) -> None:
        found = next((at for at, block in enumerate(blocks) if block not in self.order), len(blocks))
        assert self.tier.leading(blocks) == (found, self.writing.isdisjoint(blocks[:found]))

    @invariant()
    def is_the_list(self) -> None:
        self.tier.check()
        assert self.tier.hashes() == [block for block in self.order if block not in self.writing]
        assert len(self.tier) == len(self.tier.hashes())


TestHostTier = EvictsTheLeastRecentlyUsed.TestCase
TestHostTier.settings = settings(max_examples=100, stateful_step_count=40)


def engine(host: int = 40, storage: set[int] | None = None, profile: Profile = COSTS, **changes: Any) -> EngineModel:
    config = {"kv_blocks": 24, "max_model_len": 384, "max_num_batched_tokens": 64} | changes
    return EngineModel(EngineConfig(host_blocks=host, **config), profile, storage)


def ask(name: str, *blocks: int, more: int = 8, output: int = 1) -> EngineRequest:
    """A request whose prompt has these blocks and `more` tokens. Its answer's blocks are its own."""
    own = 1_000 * (sum(map(ord, name)) + 1)
    return EngineRequest(name, NamedPrompt(len(blocks) * 16 + more, blocks, range(own, own + 100)), output)


class Run:
    """Runs a model until it has nothing to do, and keeps its events with the time of their step's end."""

    def __init__(self, model: EngineModel) -> None:
        self.model, self.now = model, 0.0
        self.events: list[tuple[float, Event]] = []

    def step(self) -> None:
        result = self.model.step(self.now)
        self.now += result.duration_s
        self.events += [(round(self.now, 6), event) for event in result.events]
        self.model.finish_step()
        self.model.cache.check()
        assert self.model.offloading is not None
        self.model.offloading.host.check()

    def until_idle(self, *requests: EngineRequest) -> dict[str, FirstToken]:
        for request in requests:
            self.model.submit(request, self.now)
        while self.model.has_work or self.model.next_transfer_end is not None:
            if not self.model.has_work:
                assert self.model.next_transfer_end is not None
                self.now = max(self.now, self.model.next_transfer_end)
            self.step()
        return {event.request_id: event for event in self.of(FirstToken)}

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [event for _, event in self.events if isinstance(event, kinds)]

    def at(self, kind: type[Any]) -> list[float]:
        return [at for at, event in self.events if isinstance(event, kind)]


A, B, C = (tuple(range(start, start + 12)) for start in (100, 200, 300))


def test_evicted_blocks_are_loaded_in_the_time_that_the_profile_tells() -> None:
    run = Run(engine())
    run.until_idle(ask("a", *A))
    # Chunks of 64 tokens take 1.64 s each, the last 8 tokens 1.08 s. A chunk's blocks are copied when it has ended.
    assert run.at(FirstToken) == [pytest.approx(3 * 1.64 + 1.08)]
    assert run.at(OffloadedStored) == [pytest.approx(2 * 1.64), pytest.approx(3 * 1.64), pytest.approx(6.0)]
    run.until_idle(ask("b", *B))
    run.until_idle(ask("c", *C))
    began = run.now
    first = run.until_idle(ask("again", *A))["again"]
    assert (first.cached_tokens, first.host_tokens, first.storage_tokens) == (0, 192, 0)
    # 12 blocks, then one step for the rest.
    assert run.at(FirstToken)[-1] - began == pytest.approx(0.1 + 0.12 + 1.08)
    counters = run.model.counters
    assert (counters.external_prefix_cache_hits, counters.external_kv_transfer) == (192, 192)
    assert counters.local_compute == 3 * 200 + 8


def test_a_full_host_tier_loses_the_end_of_the_oldest_prompt_first() -> None:
    run = Run(engine(host=30))
    run.until_idle(ask("a", *A))
    run.until_idle(ask("b", *B))
    run.until_idle(ask("c", *C))
    assert run.of(OffloadedRemoved) == [
        OffloadedRemoved(HOST, (A[11], A[10])),
        OffloadedRemoved(HOST, (A[9], A[8], A[7], A[6])),
    ]
    first = run.until_idle(ask("again", *A))["again"]
    assert (first.cached_tokens, first.host_tokens) == (0, 96)


def test_a_request_waits_for_the_load_of_another_one_and_then_shares_it() -> None:
    run = Run(engine(host=60, max_num_seqs=4, kv_blocks=30))
    run.until_idle(ask("a", *A), ask("b", *B))
    run.until_idle(ask("c", *C, *range(400, 410)))
    firsts = run.until_idle(ask("x", *A), ask("y", *A))
    assert (firsts["x"].cached_tokens, firsts["x"].host_tokens) == (0, 192)
    assert (firsts["y"].cached_tokens, firsts["y"].host_tokens) == (192, 0)


def test_an_aborted_load_keeps_its_blocks_until_it_has_ended() -> None:
    run = Run(engine())
    for name, blocks in (("a", A), ("b", B), ("c", C)):
        run.until_idle(ask(name, *blocks))
    run.model.submit(ask("again", *A), run.now)
    run.step()
    assert run.model.cache.free == 12
    assert not run.model.has_work
    assert run.model.abort("again", run.now)
    run.step()
    assert run.model.cache.free == 12
    ends_at = run.model.next_transfer_end
    assert ends_at is not None
    run.now = ends_at
    run.step()
    assert run.model.cache.free == 24


def test_storage_is_shared_and_its_blocks_come_by_way_of_host_memory() -> None:
    storage: set[int] = set()
    one, other = Run(engine(storage=storage)), Run(engine(storage=storage))
    one.until_idle(ask("a", *A))
    assert storage == set(A)
    stored = [event.hashes for event in one.of(OffloadedStored) if event.medium == STORAGE]
    assert [block for blocks in stored for block in blocks] == [*A]
    first = other.until_idle(ask("a", *A))["a"]
    assert (first.cached_tokens, first.host_tokens, first.storage_tokens) == (0, 0, 192)
    # From storage, to the engine's own cache, and one step.
    assert other.at(FirstToken) == [pytest.approx(1.0 + 1.2 + 0.1 + 0.12 + 1.08)]
    assert [event.medium for event in other.of(OffloadedStored)] == [HOST]
    # What an instance has loaded is in its own host memory then.
    other.until_idle(ask("b", *B))
    other.until_idle(ask("c", *C))
    again = other.until_idle(ask("again", *A))["again"]
    assert (again.host_tokens, again.storage_tokens) == (192, 0)


def test_a_reset_empties_the_host_tier_only_if_it_is_asked_for() -> None:
    run = Run(engine())
    run.until_idle(ask("a", *A))
    assert run.model.reset_prefix_cache()
    assert run.until_idle(ask("b", *A))["b"].host_tokens == 192
    assert run.model.reset_prefix_cache(offloaded=True)
    assert run.until_idle(ask("c", *A))["c"].host_tokens == 0


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.floats(0, 30).map(lambda value: round(value, 3)),
            st.integers(0, 9),
            st.integers(1, 120),
            st.integers(1, 60),
            st.booleans(),
        ),
        min_size=1,
        max_size=10,
    ),
    host=st.integers(1, 60),
    with_storage=st.booleans(),
)
def test_every_request_is_answered_and_nothing_stays_reserved(
    requests: list[tuple[float, int, int, int, bool]], host: int, with_storage: bool
) -> None:
    model = engine(host, set() if with_storage else None)
    run = Run(model)
    held: dict[str, set[int]] = {HOST: set(), STORAGE: set()}
    for number, (at, shared, length, output, aborted) in enumerate(sorted(requests)):
        while run.now < at and (model.has_work or model.next_transfer_end is not None):
            if not model.has_work:
                assert model.next_transfer_end is not None
                run.now = max(run.now, model.next_transfer_end)
            run.step()
        run.now = max(run.now, at)
        names = [*range(1, shared + 1), *range(1_000 * (number + 1), 1_000 * (number + 1) + 100)][: length // 16]
        answer = range(1_000 * (number + 1) + 500, 1_000 * (number + 1) + 600)
        model.submit(EngineRequest(f"r{number}", NamedPrompt(length, names, answer), output), run.now)
        if aborted and number:
            model.abort(f"r{number - 1}", run.now)
    run.until_idle()
    finished = {event.request_id for event in run.of(Finished)}
    aborted_too = {f"r{at - 1}" for at, request in enumerate(sorted(requests)) if request[-1] and at}
    assert finished | aborted_too == {f"r{number}" for number in range(len(requests))}
    assert model.cache.free == model.cache.capacity
    assert model.offloading is not None
    assert not model.offloading.in_transfer
    for event in run.of(OffloadedStored, OffloadedRemoved):
        if isinstance(event, OffloadedRemoved):
            assert held[event.medium].issuperset(event.hashes), "only what was stored is removed"
            held[event.medium].difference_update(event.hashes)
        else:
            held[event.medium].update(event.hashes)
    assert held[HOST] == set(model.offloading.host.hashes())
    assert not with_storage or held[STORAGE] == model.offloading._storage


@settings(max_examples=100, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.floats(0, 30).map(lambda value: round(value, 3)), st.integers(0, 5), st.integers(1, 60)),
        min_size=1,
        max_size=8,
    )
)
def test_leaps_are_steps_with_a_host_tier_too(requests: list[tuple[float, int, int]]) -> None:
    """Where transfers take next to no time; else a leap reports the end of a copy at its own end."""

    waiting: list[tuple[float, int, int, int]] = []

    def coming(model: EngineModel) -> list[float]:
        ends_at = model.next_transfer_end
        return [at for at, *_ in waiting[:1]] + ([math.inf] if ends_at is None else [ends_at])

    def play(*, leaps: bool) -> tuple[list[Any], set[int]]:
        model, answers, now = engine(profile=QUICK, max_num_seqs=3), [], 0.0
        waiting[:] = sorted(
            (at + number * 1e-4, number, prefix, output) for number, (at, prefix, output) in enumerate(requests)
        )
        while waiting or model.has_work or model.next_transfer_end is not None:
            if not model.has_work:
                now = max(now, min(coming(model)))
            while waiting and waiting[0][0] <= now:
                _, number, prefix, output = waiting.pop(0)
                model.submit(ask(f"r{number}", *range(100 * prefix, 100 * prefix + 7), output=output), now)
            if leaps and (decode := model.decode_only_steps()) is not None:
                steps = decode.steps_by(max(min(coming(model)) - now, 0.0))
                now += decode.seconds(steps)
                events = model.finish_decode_steps(steps, now)
            else:
                result = model.step(now)
                now, events = now + result.duration_s, result.events
            model.finish_step()
            answers += [(event, round(now, 3)) for event in events if isinstance(event, FirstToken | Finished)]
        assert model.offloading is not None
        return answers, set(model.offloading.host.hashes())

    assert play(leaps=True) == play(leaps=False)
