"""The prompts that instances have computed, against a model that keeps each key in the order of use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pointsman_router.core.prefix.computed_prompts import SEGMENT_KEYS, ComputedPrompts

INSTANCES = st.sampled_from("ab")
# Prompts part in few ways and at any place, so that many share a beginning.
WORDS = st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=12).map(tuple)
ROOM = 10_000

Words = tuple[int, ...]


def keys_of(words: Words) -> list[int]:
    """Chained keys: each stands for a word and all before it."""
    return [hash(words[: end + 1]) & (1 << 64) - 1 for end in range(len(words))]


class Prompts(RuleBasedStateMachine):
    """Each key of the model has the words that it stands for and the number of its last use; the least recently used is first."""

    def __init__(self) -> None:
        super().__init__()
        self.known = ComputedPrompts(ROOM)
        self.used: dict[str, OrderedDict[int, tuple[Words, int]]] = {name: OrderedDict() for name in "ab"}
        self.number = 0
        self.counts = dict.fromkeys("ab", True)

    @rule(name=INSTANCES, words=WORDS, capacity=st.integers(0, 30))
    def learn(self, name: str, words: Words, capacity: int) -> None:
        keys, used = keys_of(words), self.used[name]
        number = self.known.learn(name, keys, capacity, counts=self.counts[name])
        assert number > self.number
        self.number = number
        for end in range(len(keys), 0, -1):
            used[keys[end - 1]] = words[:end], number
            used.move_to_end(keys[end - 1])
        while keys and len(used) > capacity:
            used.popitem(last=False)

    @rule(name=INSTANCES, words=WORDS, held=st.integers(0, 12), before=st.integers(0, 4))
    def correct(self, name: str, words: Words, held: int, before: int) -> None:
        learned, used = self.number - before, self.used[name]
        self.known.correct(name, keys_of(words), held, learned)
        for at, key in enumerate(keys_of(words)):
            if key not in used:
                return
            if at >= held and used[key][1] <= learned:
                for other, (stands_for, _) in list(used.items()):
                    if stands_for[: at + 1] == words[: at + 1]:
                        del used[other]
                return

    @rule(name=INSTANCES, counts=st.booleans())
    def count(self, name: str, counts: bool) -> None:
        self.counts[name] = counts
        self.known.set_counts(name, counts)

    @rule(name=INSTANCES)
    def drop(self, name: str) -> None:
        self.used[name].clear()
        self.known.drop(name)

    @rule(words=WORDS)
    def look_up(self, words: Words) -> None:
        keys = keys_of(words)
        for name, count in self.known.index.leading_blocks(keys, "ab").items():
            held = next((at for at, key in enumerate(keys) if key not in self.used[name]), len(keys))
            assert count == (held if self.counts[name] else 0)

    @invariant()
    def agrees(self) -> None:
        self.known.check_invariants()
        for name, used in self.used.items():
            assert self.known.keys_of(name) == set(used)


TestPrompts = Prompts.TestCase
TestPrompts.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def lengths(known: ComputedPrompts, names: Iterable[str]) -> list[int]:
    return [len(known.keys_of(name)) for name in names]


def learn(known: ComputedPrompts, name: str, keys: Sequence[int]) -> None:
    known.learn(name, keys, 1_000, counts=False)
    known.check_invariants()


def test_prompts_of_instances_that_do_not_count_are_bounded_together() -> None:
    known = ComputedPrompts(max_keys=100 + 2 * SEGMENT_KEYS)
    learn(known, "a", range(40))
    learn(known, "b", range(1_000, 1_050))
    learn(known, "a", range(50))
    assert lengths(known, "ab") == [50, 50], "the next turn costs what it adds"
    learn(known, "c", [7])
    assert lengths(known, "abc") == [50, 0, 1], "the least recently used one goes"
    known.set_counts("a", counts=True)
    known.learn("a", range(90), 1_000, counts=True)
    learn(known, "c", range(2_000, 2_099))
    assert lengths(known, "ac") == [90, 100]
    known.set_counts("a", counts=False)
    for number in range(1_000):
        learn(known, "d", [10_000 + number])
    assert sum(lengths(known, "abcd")) <= 100


def test_prompts_of_instances_that_count_are_bounded_together_whatever_their_capacity() -> None:
    known = ComputedPrompts(max_keys=100)
    for number in range(10):
        known.learn(f"i{number}", range(100 * number, 100 * number + 80), 1 << 60, counts=True)
        assert known.count(f"i{number}") == 80
        known.check_invariants()
    assert len(known.index) <= 100
    known.learn("i9", range(900, 990), 1 << 60, counts=True)
    known.learn("i0", range(11), 1 << 60, counts=False)
    assert lengths(known, ["i0", "i8", "i9"]) == [11, 0, 90], "the bound of those that do not count is another"
    known.set_counts("i0", True)
    assert lengths(known, ["i0", "i9"]) == [11, 0]
    known.check_invariants()


def test_a_fleet_that_begins_to_trust_its_events_has_nothing_swept() -> None:
    prompts = ComputedPrompts()
    prompts.learn("stays", range(10_000, 20_000), 20_000, counts=True)
    for number in range(1_000):
        keys = range(number * 100_000, number * 100_000 + 500)
        prompts.learn(f"i{number}", keys, 20_000, counts=True)
        assert prompts.count(f"i{number}") == 500
        if number % 2:
            prompts.set_counts(f"i{number}", False)
        else:
            prompts.drop(f"i{number}")
        prompts.index.sweep()
        assert not prompts.index.sweeping
    assert len(prompts.index) == prompts.count("stays") == 10_000
    prompts.check_invariants()
