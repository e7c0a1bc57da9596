"""Prefixes that an engine with several KV cache groups can reuse, by vLLM's own rules. Pure.

Such an engine stores the KV of the same tokens once for each group of layers, and evicts the blocks of each group separately. By
its rules (vllm/v1/core/kv_cache_coordinator.py) a prefix is a hit if all of these are true:

- Its length is a multiple of every group's block size.
- Each group of full attention has all blocks of the prefix.
- Each group of sliding-window attention has the blocks of the last window in the prefix, or all of them if there are fewer.
- Each Mamba group has the last block of the prefix, which holds the state after it.

So a long prefix can be a hit although a shorter one is not. The blocks of full attention are the chain that positions come from.
Blocks of other groups are found by their hash: groups share the hashes, and events of these groups leave out blocks that the
engine does not cache, so the tokens of these events cannot be assigned to blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from pointsman_agent.core.event_keys import block_keys, root_of
from pointsman_agent.core.kv_events import BlockHash, BlockStored
from pointsman_common.core.block_keys import ANCHOR_KEYS, KEY_TOKENS, anchor_of

FULL_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})

# (engine hash, hash of its parent, keys, references by group); no keys: the position of the block is not known.
SavedNode = tuple[BlockHash, BlockHash | None, tuple[int, ...], Mapping[int, int]]


class Unsupported(Exception):
    """The engine has a group, or a combination of groups, whose hits cannot be derived from its events."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group. `needed`: number of last blocks of a prefix that a hit needs; 0: all blocks of the prefix."""

    block_size: int
    needed: int


def group_of(event: BlockStored) -> Group:
    """Return the group that an event describes. Raises Unsupported."""
    kind, window, size = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, event.block_size
    if size <= 0 or size % KEY_TOKENS:
        raise Unsupported(f"blocks of {size} tokens in a KV cache group")
    if kind in FULL_KINDS:
        return Group(size, 0)
    if kind in WINDOW_KINDS and window:
        return Group(size, max(1, -(-(window - 1) // size)))
    if kind == "mamba":
        return Group(size, 1)
    raise Unsupported(f"the model has several KV cache groups, one of kind {kind}")


@dataclass(slots=True, eq=False)
class Node:
    """The blocks of all groups that end at one position of one prefix."""

    name: BlockHash  # the engine's hash, which the blocks of all groups share
    refs: dict[int, int] = field(default_factory=dict)  # group -> references, never 0; empty: kept for its children
    keys: tuple[int, ...] = ()  # of the chain's block that ends here; empty while the position is not known
    parent: Node | None = None  # None: the prompt's first block, or the position is not known
    depth: int = 0  # length of the prefix in blocks of the chain; 0 if it is not known
    # By group, the number of its blocks without a gap that end here, at most `needed`; for full attention 0 unless the run begins
    # at the root.
    runs: dict[int, int] = field(default_factory=dict)
    children: set[Node] = field(default_factory=set)  # nodes with it as parent, with or without blocks
    hit: bool = False  # whether the engine can reuse the prefix that ends here
    reported: int = 0  # number of its last keys that are reported


class GroupedBlocks:
    """The blocks of all groups of one engine, and the keys of the prefixes that are hits.

    Calls `gained` and `lost` with keys that become, or stop to be, part of the set of keys. A hit reports the key at its end. It
    reports the other keys of its last block, too, if the prefix before this block is also a hit. So whoever rounds the number of
    leading tokens down to whole blocks arrives at a hit, and a prefix without gaps has the same keys as with a single group.

    In addition, it reports the anchors (`anchor_of`) of the keys whose blocks are cached by the chain from the root on, so that
    routers need not look for hits in prompts, or parts of prompts, that the engine does not have.
    """

    def __init__(
        self, model: str, gained: Callable[[Sequence[int]], None], lost: Callable[[Sequence[int]], None]
    ) -> None:
        self.groups: dict[int, Group] = {}
        self.nodes: dict[BlockHash, Node] = {}
        self.references = 0
        self._model = model
        self._gained = gained
        self._lost = lost
        # The group that is the chain, and the tokens of its blocks; number of these blocks in a block of each group, and in the
        # shortest possible hit.
        self._chain = 0
        self._chain_size = 0
        self._strides: dict[int, int] = {}
        self._unit = 1

    # -- groups --------------------------------------------------------------------------------------------------

    def learn_groups(self, events: Iterable[BlockStored]) -> bool:
        """Add the groups of a batch's events; return whether a group is new. With a new group, no known prefix may be a hit any
        more, so the caller must forget all blocks. Raises Unsupported. Mutates."""
        groups = dict(self.groups)
        for event in events:
            group = group_of(event)
            if groups.setdefault(event.group_idx or 0, group) != group:
                raise Unsupported("blocks of different sizes in one KV cache group")
        if groups != self.groups:
            self.set_groups(groups)
            return True
        return False

    def set_groups(self, groups: Mapping[int, Group]) -> None:
        """Replace the groups; only while there are no blocks, or before all are forgotten. Raises Unsupported. Mutates."""
        self.groups = dict(groups)
        full = {index: group.block_size for index, group in groups.items() if not group.needed}
        if not full:
            raise Unsupported("the model has several KV cache groups and no full attention")
        self._chain = min(full, key=lambda index: full[index])
        chain = full[self._chain]
        sizes = sorted({group.block_size for group in groups.values()})
        if any(size % chain for size in sizes):
            raise Unsupported(f"KV cache groups with blocks of {sizes} tokens, smaller than full attention's {chain}")
        self._chain_size = chain
        self._strides = {index: group.block_size // chain for index, group in groups.items()}
        self._unit = lcm(*self._strides.values())

    # -- blocks --------------------------------------------------------------------------------------------------

    def store(self, event: BlockStored) -> int:
        """Add the blocks of an event of a known group; return how many have no known position. Mutates. Raises OverflowError,
        without a change, if a token id does not fit."""
        index = event.group_idx or 0
        unplaced = 0
        if event.block_size == self._chain_size and not self.groups[index].needed:
            unplaced = self._place(event)
        for name in event.block_hashes:
            self._hold(self._node(name), index, 1)
        return unplaced

    def remove(self, name: BlockHash, index: int, *, everything: bool) -> bool:
        """Remove one reference of a group to a block, or all with `everything`; return whether there was one. Mutates."""
        node = self.nodes.get(name)
        if node is None or index not in node.refs:
            return False
        count = node.refs[index]
        gone = count if everything else 1
        self.references -= gone
        if count > gone:
            node.refs[index] = count - gone
            return True
        del node.refs[index]
        if node.depth:
            self._update(node, index)
        self._prune(node)
        return True

    def forget(self) -> None:
        """Remove all blocks, without calling `lost`. The groups stay. Mutates."""
        self.nodes = {}
        self.references = 0

    def restore(self, nodes: Iterable[SavedNode]) -> None:
        """Add saved blocks, parents first. Mutates."""
        for name, parent, keys, refs in nodes:
            node = self._node(name)
            if keys:
                self._put(node, self.nodes[parent] if parent is not None else None, keys)
            for index, count in refs.items():
                self._hold(node, index, count)

    def saved(self) -> Iterator[SavedNode]:
        """Yield what `restore` needs."""
        for node in sorted(self.nodes.values(), key=lambda node: node.depth):
            yield node.name, node.parent.name if node.parent is not None else None, node.keys, dict(node.refs)

    def check(self) -> list[int]:
        """Return the reported keys. Raises AssertionError unless they equal those computed from the references. For tests;
        O(blocks x window)."""
        keys: list[int] = []
        hits = {node for node in self.nodes.values() if node.depth and self._is_hit_slowly(node)}
        for name, node in self.nodes.items():
            assert node.name == name
            assert node.refs or node.children
            assert all(count > 0 for count in node.refs.values())
            assert all(child.parent is node and child.depth == node.depth + 1 for child in node.children)
            assert node.parent is None or (self.nodes[node.parent.name] is node.parent and node in node.parent.children)
            assert node.hit == (node in hits), node
            wanted = 0
            if node.hit:
                wanted = len(node.keys) if node.parent is None or node.parent in hits else 1
            assert node.reported == wanted
            keys += node.keys[len(node.keys) - wanted :]
            if node.depth and self._held(node, self._chain, node.depth):
                keys += _anchors_of(node)
        assert self.references == sum(sum(node.refs.values()) for node in self.nodes.values())
        return keys

    def _node(self, name: BlockHash) -> Node:
        if (node := self.nodes.get(name)) is None:
            node = self.nodes[name] = Node(name)
        return node

    def _place(self, event: BlockStored) -> int:
        """Give the blocks of an event of the chain their positions; return how many stay without one."""
        names, size = event.block_hashes, event.block_size
        fresh = next((at for at, name in enumerate(names) if not self._placed(name)), len(names))
        if fresh == len(names):
            return 0
        before = names[fresh - 1] if fresh else event.parent_block_hash
        if len(event.token_ids) != size * len(names) or (before is not None and not self._placed(before)):
            return len(names) - fresh
        parent = self.nodes[before] if before is not None else None
        keys = block_keys(parent.keys[-1] if parent is not None else root_of(event, self._model), event, fresh)
        per_block = size // KEY_TOKENS
        for at, name in enumerate(names[fresh:]):
            node = self._node(name)
            if not node.depth:
                self._put(node, parent, tuple(keys[at * per_block : (at + 1) * per_block]))
            parent = node
        return 0

    def _placed(self, name: BlockHash) -> bool:
        node = self.nodes.get(name)
        return node is not None and node.depth > 0

    def _put(self, node: Node, parent: Node | None, keys: tuple[int, ...]) -> None:
        node.keys, node.parent, node.depth = keys, parent, parent.depth + 1 if parent is not None else 1
        if parent is not None:
            parent.children.add(node)
        # A group whose events come before the chain's may have stored the block already.
        for index in node.refs:
            self._update(node, index)

    def _hold(self, node: Node, index: int, count: int) -> None:
        held = node.refs.get(index, 0)
        node.refs[index] = held + count
        self.references += count
        if not held and node.depth:
            self._update(node, index)

    def _prune(self, node: Node | None) -> None:
        """Remove nodes that neither hold a block nor connect others to the root."""
        while node is not None and not node.refs and not node.children:
            del self.nodes[node.name]
            parent = node.parent
            if parent is not None:
                parent.children.discard(node)
            node = parent

    # -- hits ----------------------------------------------------------------------------------------------------

    def _update(self, node: Node, index: int) -> None:
        """Compute the runs of a group again from `node` on, after its reference there came or went. Stops where nothing changes:
        after one node if the group has no block after it, otherwise after at most `needed` blocks of each branch."""
        stride = self._strides[index]
        todo = [node]
        while todo:
            node = todo.pop()
            run = self._run(node, index)
            if run == node.runs.get(index, 0):
                continue
            if index == self._chain and (anchors := _anchors_of(node)):
                (self._gained if run else self._lost)(anchors)
            if run:
                node.runs[index] = run
            else:
                del node.runs[index]
            hit = self._is_hit(node)
            if hit != node.hit:
                node.hit = hit
                self._report(node)
                for child in node.children:
                    if child.hit:
                        self._report(child)
            todo += _below(node, stride)

    def _run(self, node: Node, index: int) -> int:
        stride = self._strides[index]
        if index not in node.refs or node.depth % stride:
            return 0
        if node.depth == stride:
            return 1
        before = _above(node, stride).runs.get(index, 0)
        needed = self.groups[index].needed
        if needed:
            return before + 1 if before < needed else needed
        return before + 1 if before else 0

    def _is_hit(self, node: Node) -> bool:
        if node.depth % self._unit:
            return False
        for index, group in self.groups.items():
            blocks = node.depth // self._strides[index]
            least = min(group.needed, blocks) if group.needed else blocks
            if node.runs.get(index, 0) < least:
                return False
        return True

    def _is_hit_slowly(self, node: Node) -> bool:
        """As the rules say, from the references alone."""
        if node.depth % self._unit:
            return False
        for index, group in self.groups.items():
            blocks = node.depth // self._strides[index]
            if not self._held(node, index, min(group.needed, blocks) if group.needed else blocks):
                return False
        return True

    def _held(self, node: Node, index: int, count: int) -> bool:
        """Return whether a group has the last `count` of its blocks up to `node`."""
        for left in range(count, 0, -1):
            if index not in node.refs:
                return False
            if left > 1:
                node = _above(node, self._strides[index])
        return True

    def _report(self, node: Node) -> None:
        wanted = 0
        if node.hit:
            wanted = len(node.keys) if node.parent is None or node.parent.hit else 1
        size, reported = len(node.keys), node.reported
        node.reported = wanted
        if wanted > reported:
            self._gained(node.keys[size - wanted : size - reported])
        elif wanted < reported:
            self._lost(node.keys[size - reported : size - wanted])


def _anchors_of(node: Node) -> list[int]:
    size = len(node.keys)
    first = (ANCHOR_KEYS - 1 - (node.depth - 1) * size) % ANCHOR_KEYS
    return [anchor_of(key) for key in node.keys[first::ANCHOR_KEYS]]


def _above(node: Node, levels: int) -> Node:
    for _ in range(levels):
        assert node.parent is not None
        node = node.parent
    return node


def _below(node: Node, levels: int) -> Iterable[Node]:
    below: Iterable[Node] = node.children
    for _ in range(levels - 1):
        below = [child for node in below for child in node.children]
    return below
