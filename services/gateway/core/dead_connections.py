"""Detects dead upstream connections: what is known of the peers of silent ones, and which to probe now.

An answer that does not go on is most often one that takes long: a prefill, or a queue before one. It may also be one that nobody
computes any more. A vLLM that is told to end may lose its core before its server; the server closes its port then, and leaves
its connections open without a word. So while connections are silent it is asked now and then whether their peer still accepts
new ones. That it refuses them is the only definite answer, and counts when it is given twice, with no other between: a server
that is busy, stopped or far away does not answer at all, and a vLLM that still computes has its port open, when it drains, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

SILENT_S = 3.0  # longer than a busy engine takes between two tokens, so that most streams are never asked about
PROBE_EVERY_S = 2.0  # from an answer that leaves all open to the next question
REPROBE_S = 1.0  # from a refusal to the next question
REFUSALS = 2  # in a row

# A socket's address: host and port, for IPv6 with flow and scope.
Peer = tuple[str, int] | tuple[str, int, int, int]


@dataclass(slots=True)
class _Known:
    refusals: int = 0
    due: float = -math.inf  # when to ask next; infinite while an answer is awaited


class DeadConnectionDetector:
    """What is known of the peers of silent connections, one question at a time for each."""

    def __init__(self) -> None:
        self._known: dict[Peer, _Known] = {}

    def due(self, silent: Collection[Peer], now: float) -> list[Peer]:
        """Which peers to ask now; `silent` are those with a connection that has been silent for SILENT_S, the others are
        forgotten. Mutates."""
        for peer, known in list(self._known.items()):
            if peer not in silent:
                known.refusals = 0
                if known.due <= now:
                    del self._known[peer]
        asked = []
        for peer in silent:
            known = self._known.setdefault(peer, _Known())
            if known.due <= now:
                known.due = math.inf
                asked.append(peer)
        return asked

    def probed(self, peer: Peer, *, refused: bool, now: float) -> None:
        """A peer that was due has been asked. Mutates."""
        known = self._known[peer]
        known.refusals = known.refusals + 1 if refused else 0
        known.due = now + (REPROBE_S if refused else PROBE_EVERY_S)

    def is_dead(self, peer: Peer) -> bool:
        """Whether nobody is left there."""
        return peer in self._known and self._known[peer].refusals >= REFUSALS
