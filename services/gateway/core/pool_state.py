"""What is known of one model: its instances, its tokenizer, and whether that tokenizer equals the engines'."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pointsman.gateway.core.api import Endpoint
from pointsman.gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman.router.v1 import placement_pb2

RECHECK_PAUSE_S = 60.0
Incarnation = tuple[str, str]  # an instance's URL and incarnation


class TokenizerStatus(enum.Enum):
    """How far our tokens of a model can be trusted."""

    CHECKING = "checking"
    EXACT = "exact"
    INEXACT = "inexact"


@dataclass
class PoolState:
    """One model. `tokenizer` is used only while `exactness` is EXACT; `reason` says why it is not."""

    pool: placement_pb2.Pool
    tokenizer: ModelTokenizer | None = None
    source: str = ""
    tokenizer_status: TokenizerStatus = TokenizerStatus.CHECKING
    reason: str = "not checked yet"
    verified: set[Incarnation] = field(default_factory=set)
    differed: set[Incarnation] = field(default_factory=set)  # when they were last compared with the tokenizer
    hub_asked_for: set[Incarnation] = field(default_factory=set)  # that differed: for whom its newest was asked for
    mismatches: Counter[Endpoint] = field(default_factory=Counter)  # in a row
    inexact_endpoints: set[Endpoint] = field(
        default_factory=set
    )  # APIs whose prompts we were seen to convert otherwise
    rechecked_at: float = -RECHECK_PAUSE_S

    def incarnations(self) -> frozenset[Incarnation]:
        """Those of the instances that are there."""
        return frozenset((one.url, one.incarnation) for one in self.pool.instances)

    def tokenizer_for(self, endpoint: Endpoint) -> ModelTokenizer | None:
        """The tokenizer, where its tokens are known to be the engine's for an API's prompts."""
        return (
            self.tokenizer
            if self.tokenizer_status is TokenizerStatus.EXACT and endpoint not in self.inexact_endpoints
            else None
        )


def names_of(pools: Iterable[placement_pb2.Pool]) -> dict[str, tuple[str, str]]:
    """Any name that a client may ask for -> the pool it means, and the LoRA adapter it names ("" for none). As routers have it
    (`InstanceRegistry`): a name that several pools answer to means the pool of that name, or the first by name; within a pool a
    served name goes before an adapter's."""
    ordered = sorted(pools, key=lambda pool: pool.model)
    names = {pool.model: (pool.model, "") for pool in ordered}
    for pool in ordered:
        for name in pool.served_names:
            names.setdefault(name, (pool.model, ""))
        for lora in pool.lora_names:
            names.setdefault(lora, (pool.model, lora))
    return names
