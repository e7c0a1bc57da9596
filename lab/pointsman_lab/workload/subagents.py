"""Sub-agents: sessions for whose end a turn of another session waits. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec import structs

from pointsman_lab.workload.session_starts import Session
from pointsman_lab.workload.traces import TraceRequest


class SubagentRequest(TraceRequest, frozen=True, kw_only=True):
    """The first turn of a sub-agent. It is sent when turn `parent_turn` of the session `parent` has been answered; the parent's
    next turn waits until all its sub-agents have ended. `names_parent`: whether its requests name the parent."""

    parent: str
    parent_turn: int
    names_parent: bool = True


@dataclass(frozen=True)
class Subagents:
    """How many sessions have sub-agents. A `share` of the sessions of two turns or more, chosen at random, has 1 to `most` of
    them, at one of its turns. Their prompts begin with the first `shared_tokens` of the parent's (system prompt and tools).

    With `named_parents` a sub-agent's requests name their parent; otherwise only their shared blocks tell of it.
    """

    share: float = 0.0
    most: int = 3
    shared_tokens: int = 8_192
    named_parents: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: {self.share:g} is not in 0 to 1")
        if self.most < 1:
            raise ValueError(f"most: {self.most} is not at least 1")


def with_subagents(sessions: Sequence[Session], subagents: Subagents, seed: int) -> list[Session]:
    """Return the same sessions in the same order, of which some have become sub-agents of the session before them.

    So the number of sessions does not depend on the share. Sub-agents follow their parents directly. Mutates nothing.
    """
    rng = random.Random(f"subagents {seed}")
    found: list[Session] = []
    left = iter(sessions)
    for turns in left:
        found.append(turns)
        if len(turns) > 1 and rng.random() < subagents.share:
            turn = turns[rng.randrange(len(turns) - 1)]
            children = islice(left, rng.randint(1, subagents.most))
            found += [_child(child, turn, subagents) for child in children]
    return found


def _child(turns: Session, parent: TraceRequest, subagents: Subagents) -> Session:
    """Return `turns` as a sub-agent of `parent`, with the parent's first blocks in place of its own."""
    shared = parent.hash_ids[: subagents.shared_tokens // parent.block_size]
    if parent.block_size != turns[0].block_size:
        shared = ()
    moved = [
        structs.replace(turn, hash_ids=(shared + turn.hash_ids[len(shared) :])[: len(turn.hash_ids)]) for turn in turns
    ]
    fields = structs.asdict(moved[0]) | {"timestamp_ms": parent.timestamp_ms}
    first = SubagentRequest(
        **fields, parent=parent.session, parent_turn=parent.turn, names_parent=subagents.named_parents
    )
    return [first, *moved[1:]]
