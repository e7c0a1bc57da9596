"""State of one model: its instances, its tokenizer, and whether that tokenizer equals the engines' tokenizer."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import Endpoint
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer

# Minimum interval between two rechecks of a tokenizer that token counts of engines cause, s.
RECHECK_PAUSE_S = 60.0
Incarnation = tuple[str, str]  # an instance's URL and incarnation


class TokenizerStatus(enum.Enum):
    """Whether the gateway's tokens of a model equal the engines'."""

    CHECKING = "checking"
    EXACT = "exact"
    INEXACT = "inexact"


@dataclass
class PoolState:
    """State of one model. `tokenizer` is used only while `tokenizer_status` is EXACT; `reason` says why it is not EXACT."""

    pool: placement_pb2.Pool  # the newest description by routers
    tokenizer: ModelTokenizer | None = None
    source: str = ""  # folder or hub id that `tokenizer` is from; empty: none was loaded
    tokenizer_status: TokenizerStatus = TokenizerStatus.CHECKING
    reason: str = "not checked yet"
    verified: set[Incarnation] = field(default_factory=set)  # their tokens equal those of `tokenizer`
    differed: set[Incarnation] = field(default_factory=set)  # at the last comparison with the tokenizer
    hub_asked_for: set[Incarnation] = field(default_factory=set)  # differed, and the hub was queried for them
    mismatches: Counter[Endpoint] = field(default_factory=Counter)  # differing token counts in a row
    # APIs whose prompts the gateway converts differently from the engine.
    inexact_endpoints: set[Endpoint] = field(default_factory=set)
    rechecked_at: float = -RECHECK_PAUSE_S  # monotonic s of the last recheck that token counts caused

    def incarnations(self) -> frozenset[Incarnation]:
        """Return the incarnations of the pool's instances."""
        return frozenset((instance.url, instance.incarnation) for instance in self.pool.instances)

    def foreign(self) -> frozenset[Incarnation]:
        """Return the incarnations of instances that have their tokenizer from another place than the pool. Their tokens decide
        nothing for the others."""
        place = _place(self.pool.model_root)
        return frozenset(
            (instance.url, instance.incarnation)
            for instance in self.pool.instances
            if instance.model_root and place and _place(instance.model_root) != place
        )

    def settled(self) -> frozenset[Incarnation]:
        """Return the incarnations of which nothing is left to compare."""
        return frozenset(self.verified | (self.differed & self.foreign()))

    def tokens_equal(self, url: str, incarnation: str) -> bool | None:
        """Return whether an instance's tokens equal those of `tokenizer`; None if it is not known."""
        instance = (url, incarnation)
        return True if instance in self.verified else False if instance in self.differed else None

    def tokenizer_for(self, endpoint: Endpoint) -> ModelTokenizer | None:
        """Return the tokenizer if its tokens of the API's prompts equal the engine's, else None."""
        exact = self.tokenizer_status is TokenizerStatus.EXACT and endpoint not in self.inexact_endpoints
        return self.tokenizer if exact else None


def _place(root: str) -> str:
    """Return a tokenizer's place without its revision: revisions mostly have the same tokenizer, and are compared."""
    return root.partition("@")[0]


def instances_without(pool: placement_pb2.Pool, model: str) -> list[str]:
    """Return the ids of the pool's instances that have not loaded `model`, if it is an adapter; empty if no instance tells which
    adapters it has, as with routers of earlier versions."""
    if model == pool.model or model in pool.served_names or model not in pool.lora_names:
        return []
    without = [instance.instance_id for instance in pool.instances if model not in instance.lora_names]
    return without if any(instance.lora_names for instance in pool.instances) else []


def names_of(pools: Iterable[placement_pb2.Pool]) -> dict[str, tuple[str, str]]:
    """Return, for each name that a client may request, its pool and the LoRA adapter that it names ("": none).

    The rules are those of routers (`InstanceRegistry`). A name that several pools serve means the pool of that name, or else the
    first pool by name. Within a pool a served name takes precedence over an adapter's name.
    """
    ordered = sorted(pools, key=lambda pool: pool.model)
    names = {pool.model: (pool.model, "") for pool in ordered}
    for pool in ordered:
        for name in pool.served_names:
            names.setdefault(name, (pool.model, ""))
        for lora in pool.lora_names:
            names.setdefault(lora, (pool.model, lora))
    return names
