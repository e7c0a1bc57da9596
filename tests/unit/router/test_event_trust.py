"""An instance's KV events count as exact only while they agree with its answers, by example."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman_common.core.block_keys import prompt_keys
from pointsman_common.core.key_report_types import Delta
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.event_trust import SETTLE_S, WINDOW
from pointsman_router.core.placement_types import InstanceState, Load, PrefixSource
from pointsman_router.core.router_state import RouterState
from tests.support.router_values import join, place, request, state
from tests.unit.router.test_prefix_knowledge import answer, record_of, report, seen, speaks

EVENTS, APPROXIMATE = PrefixSource.EVENTS, PrefixSource.APPROXIMATE


def prompt(number: int) -> list[int]:
    return list(range(1_000 * number, 1_000 * number + 200))


def keys(number: int) -> list[int]:
    return prompt_keys(prompt(number), "m")


class World:
    """One instance, whose engine computes what it is sent; `reported` says which of its blocks its events report."""

    def __init__(self, **changes: Any) -> None:
        self.router: RouterState = state()
        join(self.router, "a", 1, proven=False, **changes)
        self.seq = 0
        self.now = 0.0
        self.queries = self.hits = 0
        self.effects: list[ev.Effect] = []

    def turn(self, number: int, *, cached: int | None = None, reported: bool = True) -> None:
        self.now += 1.0
        self.queries += 200
        self.effects += answer(self.router, f"r{self.now}", cached=cached, now=self.now, prompt=prompt(number))
        if reported:
            self.tell(keys(number))
        for _ in range(3):
            self.now += 1.0
            self.speak()

    def ask(self, number: int, *, told: bool) -> None:
        """Let the engine compute a prompt; further ones follow at once."""
        self.now += 0.1
        self.queries += 200
        self.effects += answer(self.router, f"r{self.now}", cached=0, now=self.now, prompt=prompt(number))
        if told:
            self.tell(keys(number))

    def speak(self) -> None:
        load = Load(self.now, prefix_cache_queries=self.queries, prefix_cache_hits=self.hits)
        self.effects += self.router.handle(ev.LoadReported(record_of(self.router).stream_id, "a", load), self.now)
        self.router.check_invariants()

    def tell(self, added: list[int], removed: list[int] | None = None) -> None:
        held = [key for key in added if self.router.index.holds("a", key)]
        self.seq += 1
        self.effects += report(
            self.router, Delta(self.seq, 1, added=[k for k in added if k not in held], removed=removed or []), self.now
        )
        self.router.check_invariants()

    def source(self) -> PrefixSource:
        return self.router.prefix_knowledge.source(record_of(self.router), self.now)

    def cached(self, number: int) -> int:
        return seen(self.router, prompt(number), self.now).cached_tokens


def proven(**changes: Any) -> World:
    world = World(**changes)
    world.turn(0, cached=0)
    assert world.source() is EVENTS
    return world


def test_announced_events_count_as_exact_after_an_answer_that_they_confirm() -> None:
    world = World()
    assert (world.source(), "no answer" in record_of(world.router).prefix_reason) == (APPROXIMATE, True)
    world.turn(0, cached=0)
    assert (world.source(), record_of(world.router).prefix_reason) == (EVENTS, "")
    assert [effect.again for effect in world.effects if isinstance(effect, ev.EventsTrusted)] == [False]


def test_events_that_never_arrive_are_not_worse_than_none() -> None:
    world = World()
    for number in range(10):
        world.turn(number, cached=0, reported=False)
        assert (world.source(), world.cached(number)) == (APPROXIMATE, 192)
    assert "KV events" in record_of(world.router).prefix_reason
    assert len([effect for effect in world.effects if isinstance(effect, ev.EventsDistrusted)]) == 1
    assert record_of(world.router).state is InstanceState.READY


def test_events_that_stop_are_replaced_by_placements_and_return_by_evidence() -> None:
    world = proven()
    for number in range(1, 11):
        world.turn(number, cached=0, reported=False)
    assert world.source() is APPROXIMATE
    [distrusted] = [effect for effect in world.effects if isinstance(effect, ev.EventsDistrusted)]
    assert "blocks" in distrusted.reason
    # What events had told counts on, with what was placed since.
    assert [world.cached(number) for number in range(11)] == [192] * 11
    for number in range(20, 40):
        world.turn(number, cached=0)
    assert world.source() is EVENTS
    assert [effect.again for effect in world.effects if isinstance(effect, ev.EventsTrusted)] == [False, True]
    # The copy lacks what was not told.
    assert [world.cached(number) for number in (0, 5, 25)] == [192, 0, 192]


def test_what_was_placed_counts_until_it_is_known_whether_its_events_come_though_others_have_come() -> None:
    """Half of the events are lost: the first answer of which they come makes all others seem exact."""
    world = World()
    world.ask(1, told=False)
    world.ask(2, told=True)
    assert world.source() is EVENTS
    assert (world.cached(1), world.cached(2)) == (192, 192)
    world.now += SETTLE_S
    world.speak()
    assert world.source() is EVENTS
    assert record_of(world.router).trust.doubted
    assert (world.cached(1), world.cached(2)) == (192, 192)
    for number in range(3, 3 + WINDOW):
        world.ask(number, told=True)
    assert not record_of(world.router).trust.doubted


def test_nothing_is_doubted_once_the_events_have_come_that_were_late_when_they_were_trusted() -> None:
    world = World()
    world.ask(1, told=False)
    world.ask(2, told=True)
    assert record_of(world.router).trust.doubted
    world.tell(keys(1))
    assert not record_of(world.router).trust.doubted
    assert (world.source(), world.cached(1), world.cached(2)) == (EVENTS, 192, 192)


def test_what_was_placed_counts_until_its_events_are_late_and_the_agent_speaks_again() -> None:
    world = proven()
    world.ask(1, told=False)
    asked_at = world.now
    while world.now < asked_at + 3 * SETTLE_S:
        world.now += 0.9
        world.router.handle(ev.Tick(), world.now)
        assert world.cached(1) == 192, f"{world.now - asked_at:.1f} s after it was computed"
        world.speak()
        assert world.cached(1) == 192, f"{world.now - asked_at:.1f} s after it was computed"
    assert world.source() is EVENTS


def test_an_idle_engine_and_full_hits_are_no_evidence_against_events() -> None:
    world = proven()
    for _ in range(20):
        world.now += 10.0
        world.speak()
        world.turn(0, cached=192, reported=False)
    assert world.source() is EVENTS


@pytest.mark.parametrize("sparse", [False, True])
def test_blocks_that_are_evicted_as_soon_as_their_answer_has_begun_are_no_evidence_against_events(sparse: bool) -> None:
    """A full cache: the answer's blocks were told before it began, and make way for the next prompt at once."""
    world = proven(sparse_prefixes=sparse)
    for number in range(1, 20):
        world.now += 1.0
        assert isinstance(place(world.router, request(f"r{number}", prompt=prompt(number)), world.now), ev.Placed)
        world.tell(keys(number))
        world.router.handle(ev.FirstToken(f"r{number}"), world.now)
        world.router.handle(ev.Finished(f"r{number}", "OK", cached_tokens=0), world.now)
        world.tell([], keys(number))
    world.now += SETTLE_S
    world.speak()
    assert (world.source(), record_of(world.router).trust.doubted) == (EVENTS, False)


def test_blocks_of_which_removal_was_told_and_that_answers_use_contradict_events() -> None:
    world = proven()
    for number in range(1, 6):
        world.turn(number, cached=0)
    for number in range(6):
        world.tell([], keys(number))
    for number in range(6):
        world.turn(number, cached=192, reported=False)
    assert world.source() is APPROXIMATE
    assert [world.cached(number) for number in range(6)] == [192] * 6


def test_blocks_that_answers_do_not_find_end_what_events_told_but_not_what_was_placed() -> None:
    world = proven()
    for number in range(10, 16):
        world.tell(keys(number))
    for number in range(10, 15):
        world.turn(number, cached=0)
    assert world.source() is APPROXIMATE
    assert any(isinstance(effect, ev.Resync) for effect in world.effects)
    assert any(isinstance(effect, ev.PredictionAuditFailed) for effect in world.effects)
    assert (world.cached(0), world.cached(10), world.cached(15)) == (192, 192, 0)


def test_without_usage_details_the_engines_counters_show_blocks_that_are_not_there() -> None:
    world = proven()
    for number in range(10, 30):
        world.tell(keys(number))
    for number in range(10, 30):
        world.turn(number, reported=False)
    assert world.source() is APPROXIMATE


def test_without_usage_details_right_counters_are_no_evidence_against_events() -> None:
    world = proven()
    for number in range(10, 40):
        world.tell(keys(number))
    for number in range(10, 40):
        world.hits += 192
        world.turn(number, reported=False)
    assert world.source() is EVENTS


def test_a_second_loss_of_trust_needs_more_evidence_than_the_first() -> None:
    world = proven()
    needed = []
    for again in range(1, 3):
        for number in range(100 * again, 100 * again + 10):
            world.turn(number, cached=0, reported=False)
        assert world.source() is APPROXIMATE
        count = 0
        while world.source() is APPROXIMATE:
            count += 1
            world.turn(100 * again + 50 + count % 40, cached=0)
        needed.append(count)
    assert needed[1] > needed[0] > 1


def test_the_reason_names_what_the_agent_says_of_the_events() -> None:
    world = World()
    world.router.handle(ev.LoadReported(1, "a", Load(1.0, events_problem="tcp://x did not answer in 5 s")), 1.0)
    assert "tcp://x did not answer in 5 s" in record_of(world.router).prefix_reason


def test_a_new_incarnation_starts_without_trust_and_without_placements() -> None:
    world = proven()
    join(world.router, "a", 2, proven=False, incarnation="2")
    assert (world.source(), world.cached(0)) == (APPROXIMATE, 0)


def test_a_block_that_can_miss_is_not_credited() -> None:
    world = World(uncertain_blocks=1, block_size=32)
    world.turn(0, cached=0)
    assert (world.source(), world.cached(0)) == (EVENTS, 192 - 32)
    for _ in range(9):
        world.turn(0, cached=160, reported=False)
    assert world.source() is EVENTS


@pytest.mark.parametrize("reported", [True, False])
def test_trust_is_learned_with_requests_in_flight_all_the_time(reported: bool) -> None:
    """Twenty answers a second, more than can be waited for."""
    router = state()
    join(router, "a", 1, proven=False)
    seq = 0
    for number in range(200):
        now = number / 20
        answer(router, f"r{number}", cached=0, now=now, prompt=prompt(number))
        if reported:
            seq += 1
            report(router, Delta(seq, 1, added=keys(number)), now)
        else:
            speaks(router, now)
    source = router.prefix_knowledge.source(record_of(router), 10.0)
    assert source is (EVENTS if reported else APPROXIMATE)
    assert ("blocks" in record_of(router).prefix_reason) is not reported


def test_a_placement_that_is_open_when_trust_ends_is_judged_without_error() -> None:
    world = proven()
    place(world.router, request("open", prompt=prompt(0)), world.now)
    for number in range(1, 11):
        world.turn(number, cached=0, reported=False)
    world.router.handle(ev.FirstToken("open"), world.now)
    world.router.handle(ev.Finished("open", "OK", cached_tokens=0), world.now)
    world.router.check_invariants()
