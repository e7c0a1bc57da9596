"""The prompts that instances have computed by the router's own placements, and the keys that are probably cached of them. Pure.

A prompt whose first token came was computed, so its keys are cached. An engine whose KV cache is full evicts the least recently
used blocks, the end of a prompt before its beginning. Answers with fewer cached tokens than predicted correct what is assumed.
Requests that others send to the engine, past the router, stay unknown, so these keys never count as exact.

The prompts of an instance are a radix tree: a segment has the keys that follow those of its parent, up to where prompts part, 8
bytes each. So the next turn of a session costs what it adds, not what it repeats. The order of use is one of segments; a child
is never used later than its parent. An instance counts if decisions look its keys up: then they are in an index, too. Those of
all others are kept so that they count as soon as their KV events are no longer trusted. Both sorts are bounded, each together.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from pointsman_router.core.prefix.exact_index import UNBOUNDED, PrefixIndex

# Maximum size of the prompts of all instances that do not count, in keys. A segment takes as much memory as SEGMENT_KEYS of them.
MAX_OTHERS = 4_000_000
SEGMENT_KEYS = 64
# Number of keys that are removed in less than a millisecond.
FEW_KEYS = 2_000

_NO_CHILDREN: Mapping[int, _Segment] = MappingProxyType({})


class _Segment:
    """Keys of one or more prompts of an instance, and the segments that follow, by their first keys."""

    __slots__ = ("children", "instance_id", "keys", "parent", "used")

    def __init__(self, instance_id: str, keys: array[int]) -> None:
        self.instance_id = instance_id
        self.keys = keys
        self.parent: _Segment | None = None
        self.used = 0  # number of the prompt that used it last
        self.children: Mapping[int, _Segment] = _NO_CHILDREN

    def adopt(self, child: _Segment) -> None:
        child.parent = self
        if self.children is _NO_CHILDREN:  # Most segments have none, and a dict takes 200 bytes.
            self.children = {}
        assert isinstance(self.children, dict)
        self.children[child.keys[0]] = child

    def leave(self) -> None:
        """End to be a child of the parent."""
        assert self.parent is not None
        assert isinstance(self.parent.children, dict)
        del self.parent.children[self.keys[0]]

    def common(self, keys: Sequence[int], at: int) -> int:
        """Return with how many of its keys those of a prompt agree from `at` on; its first one does. Keys are chained."""
        low, high = 1, min(len(self.keys), len(keys) - at)
        if self.keys[high - 1] == keys[at + high - 1]:
            return high
        while low < high:
            middle = (low + high) >> 1
            if self.keys[middle] == keys[at + middle]:
                low = middle + 1
            else:
                high = middle
        return low


class _Tree:
    """The prompts of one instance: behind a root without keys, its segments, which are also in the order of use, least recently
    used first."""

    __slots__ = ("counts", "order", "root", "size")

    def __init__(self, instance_id: str) -> None:
        self.root = _Segment(instance_id, array("Q"))
        self.order: OrderedDict[_Segment, None] = OrderedDict()
        self.size = 0
        self.counts = False

    @property
    def cost(self) -> int:
        # Beside the entries that the keys have in the index if the instance counts, the segments are small.
        return self.size + (0 if self.counts else SEGMENT_KEYS * len(self.order))

    def walk(self, keys: Sequence[int]) -> Iterator[tuple[_Segment, int, int]]:
        """Yield the segments that a prompt begins with, each with the number of the prompt's keys before it, and with how many of
        its own the prompt goes on. Of the last one these may be fewer than all; the caller may change that one."""
        segment, at = self.root, 0
        while at < len(keys) and (child := segment.children.get(keys[at])) is not None:
            common = child.common(keys, at)
            whole = common == len(child.keys)
            yield child, at, common
            if not whole:
                return
            segment, at = child, at + common


class ComputedPrompts:
    """Prompts by instance, with at most as many keys of an instance as its capacity, and at most `max_keys` of all that count.
    Those that do not count are bounded by MAX_OTHERS, too, where each segment counts SEGMENT_KEYS more."""

    def __init__(self, max_keys: int = UNBOUNDED) -> None:
        self.index = PrefixIndex()
        self._trees: dict[str, _Tree] = {}
        # By whether their instances count: the segments, least recently used first, what they cost, and what they may cost.
        self._orders = OrderedDict[_Segment, None](), OrderedDict[_Segment, None]()
        self._costs = [0, 0]
        self._max_costs = min(max_keys, MAX_OTHERS), max_keys
        self._learned = 0  # number of prompts so far

    def count(self, instance_id: str) -> int:
        """Return how many keys an instance that counts is assumed to hold; 0 if it does not count."""
        return self.index.count(instance_id)

    def learn(self, instance_id: str, keys: Sequence[int], capacity: int, *, counts: bool) -> int:
        """Record that `keys`, those of a prompt from its first block on, were just used on an instance that can hold `capacity`
        keys. Return the prompt's number, which grows. Mutates."""
        self._learned += 1
        if not keys:
            return self._learned
        self.set_counts(instance_id, counts)
        tree = self._trees.setdefault(instance_id, _Tree(instance_id))
        tree.counts = counts
        before = tree.cost
        path, known = self._path(tree, keys)
        if known < len(keys):
            self._extend(tree, path, array("Q", keys[known:]))
        for segment in reversed(path):
            segment.used = self._learned
            tree.order.move_to_end(segment)
            self._orders[counts][segment] = None
            self._orders[counts].move_to_end(segment)
        self._costs[counts] += tree.cost - before
        while tree.size > capacity:
            oldest = next(iter(tree.order))
            self._cut(tree, oldest, max(len(oldest.keys) - (tree.size - capacity), 0))
        self._keep_to_maximum()
        return self._learned

    def correct(self, instance_id: str, keys: Sequence[int], held: int, learned: int) -> None:
        """Remove the keys that follow the first `held` of `keys`, those that no prompt after the number `learned` has used: the
        engine turned out not to have held them when it computed that prompt. Mutates."""
        if (tree := self._trees.get(instance_id)) is None:
            return
        for segment, at, common in tree.walk(keys):
            if at + common > held and segment.used <= learned:
                self._cut(tree, segment, max(held - at, 0))
                return

    def set_counts(self, instance_id: str, counts: bool) -> None:
        """Set whether decisions look the keys of an instance up. Mutates."""
        tree = self._trees.get(instance_id)
        if tree is None or tree.counts is counts:
            return
        self._leave(tree)
        tree.counts = counts
        self._orders[counts].update(tree.order)
        self._costs[counts] += tree.cost
        if counts:
            for segment in tree.order:
                self.index.add(instance_id, segment.keys)
        self._keep_to_maximum()

    def drop(self, instance_id: str) -> None:
        """Remove all prompts of an instance. Mutates."""
        if (tree := self._trees.pop(instance_id, None)) is not None:
            self._leave(tree)

    def keys_of(self, instance_id: str) -> set[int]:
        """Return all keys of an instance, for tests and dumps."""
        tree = self._trees.get(instance_id)
        return {key for segment in tree.order for key in segment.keys} if tree is not None else set()

    def check_invariants(self) -> None:
        """Raise AssertionError if the trees, the orders of use, the sums and the index disagree."""
        self.index.check_invariants()
        counted = {name: self.keys_of(name) for name, tree in self._trees.items() if tree.counts}
        assert {name: keys for name, keys in counted.items() if keys} == self.index.sets()
        for counts in (False, True):
            trees = [tree for tree in self._trees.values() if tree.counts is counts]
            assert self._costs[counts] == sum(tree.cost for tree in trees) <= self._max_costs[counts]
            assert set(self._orders[counts]) == {segment for tree in trees for segment in tree.order}
        for order in (*self._orders, *(tree.order for tree in self._trees.values())):
            used: set[_Segment] = set()
            for segment in order:
                if segment.children:
                    assert used.issuperset(segment.children.values()), "a child was used later than its parent"
                used.add(segment)
        for tree in self._trees.values():
            assert tree.order
            assert tree.size == sum(len(segment.keys) for segment in tree.order)
            for segment in (tree.root, *tree.order):
                if not segment.children:
                    continue
                assert {child.keys[0]: child for child in segment.children.values()} == segment.children
                assert all(child.parent is segment and child in tree.order for child in segment.children.values())
            assert all(segment.parent in tree.order or segment.parent is tree.root for segment in tree.order)

    def _leave(self, tree: _Tree) -> None:
        """Remove a tree from those that count, or from those that do not. A few keys are removed from the index one by one: a
        fleet that begins to trust its events would have the whole index swept again and again. Mutates."""
        self._costs[tree.counts] -= tree.cost
        for segment in tree.order:
            del self._orders[tree.counts][segment]
        if tree.counts and tree.size <= FEW_KEYS:
            for segment in tree.order:
                self.index.remove(segment.instance_id, segment.keys)
        self.index.drop(tree.root.instance_id)

    def _keep_to_maximum(self) -> None:
        for order, counts in zip(self._orders, (False, True), strict=True):
            while self._costs[counts] > self._max_costs[counts]:
                oldest = next(iter(order))
                self._cut(self._trees[oldest.instance_id], oldest, 0)

    def _path(self, tree: _Tree, keys: Sequence[int]) -> tuple[list[_Segment], int]:
        """Return the segments that a prompt begins with, and how many keys they have. The last one is split where the prompt
        leaves it. Mutates."""
        path: list[_Segment] = []
        known = 0
        for segment, at, common in tree.walk(keys):
            known = at + common
            if common == len(segment.keys):
                path.append(segment)
                continue
            # What is behind the place keeps its order of use; the beginning is used now.
            start = _Segment(segment.instance_id, segment.keys[:common])
            segment.leave()
            (path[-1] if path else tree.root).adopt(start)
            segment.keys = segment.keys[common:]
            start.adopt(segment)
            tree.order[start] = None
            path.append(start)
        return path, known

    def _extend(self, tree: _Tree, path: list[_Segment], new: array[int]) -> None:
        """Add the keys `new` behind a path. Mutates."""
        instance_id = tree.root.instance_id
        if path and not path[-1].children:
            path[-1].keys.extend(new)
        else:
            segment = _Segment(instance_id, new)
            (path[-1] if path else tree.root).adopt(segment)
            tree.order[segment] = None
            path.append(segment)
        tree.size += len(new)
        if tree.counts:
            self.index.add(instance_id, new)

    def _cut(self, tree: _Tree, segment: _Segment, kept: int) -> None:
        """Remove all but the first `kept` keys of a segment, and what follows them. Mutates."""
        before = tree.cost
        removed = list(segment.children.values())
        if kept:
            tree.size -= len(segment.keys) - kept
            if tree.counts:
                self.index.remove(segment.instance_id, segment.keys[kept:])
            del segment.keys[kept:]
            segment.children = _NO_CHILDREN
        else:
            segment.leave()
            segment.children = _NO_CHILDREN
            removed.append(segment)
        while removed:
            gone = removed.pop()
            removed += gone.children.values()
            del tree.order[gone]
            tree.size -= len(gone.keys)
            if tree.counts:
                self.index.remove(gone.instance_id, gone.keys)
            del self._orders[tree.counts][gone]
        self._costs[tree.counts] += tree.cost - before
        if not tree.order:
            del self._trees[segment.instance_id]
            self.index.drop(segment.instance_id)
