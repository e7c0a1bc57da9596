"""Which blocks of a transfer are checked by checksums, what follows from a difference, and how it is configured. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Keys of a connector's statistics: requests whose KV was checked, those whose KV arrived after its answer, and the prefix of
# those that count requests with wrong KV. The URL of the sender's bootstrap server, a space, and its engine id follow the prefix.
CHECKED, LATE, WRONG_FROM = "num_checked_requests", "num_late_requests", "num_wrong_requests_from "

# Checksums of one request: how many blocks before the end of the prompt a block is (1: the last one), and its checksum.
Sums = list[tuple[int, int]]


@dataclass(frozen=True)
class CheckSettings:
    """`checked_share` of the transfers are checked, 0 to 1, each by `checked_blocks` of its blocks at most."""

    share: float = 1.0
    blocks: int = 4

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> CheckSettings:
        """From kv_connector_extra_config. Raises ValueError for values out of range."""
        settings = cls(
            float(extra_config.get("checked_share", cls.share)), int(extra_config.get("checked_blocks", cls.blocks))
        )
        if not 0 <= settings.share <= 1 or settings.blocks < 1:
            raise ValueError("checked_share must be from 0 to 1, and checked_blocks at least 1")
        return settings

    def positions(self, total: int, rng: random.Random, *, last_is_fixed: bool) -> tuple[int, ...]:
        """Blocks to check of a prompt of `total` blocks: how many blocks before its end each is, ascending; none where this
        transfer is not checked. `last_is_fixed`: no later token gets into the last block; if False, that one is left out. Always
        the last one of the others; further ones are drawn, half of them near the end, because a receiver that has a prefix in its
        own cache gets the last blocks only."""
        first = 1 if last_is_fixed else 2
        if total < first or rng.random() >= self.share:
            return ()
        chosen = {first}
        for number in range(1, self.blocks):
            near = number % 2 == 1
            chosen.add(rng.randint(first, min(total, 16) if near else total))
        return tuple(sorted(chosen))


def differing(sums: Sums, computed: Sequence[int]) -> list[int]:
    """Positions (blocks before the prompt's end) whose checksums differ. `computed` are the receiver's, in the order of
    `sums`."""
    return [position for (position, value), own in zip(sums, computed, strict=True) if value != own]


class RefusedSenders:
    """Engines whose KV differed once. A receiver loads nothing from them until one of the two processes has been restarted.

    An engine's id is new at each start unless the operator fixes it, so a sender that was restarted is not refused any more.
    """

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._refused

    def refuse(self, engine_id: str) -> bool:
        """Refuse an engine; whether it was not refused before."""
        new = engine_id not in self._refused
        self._refused.add(engine_id)
        return new
