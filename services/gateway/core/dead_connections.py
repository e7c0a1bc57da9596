"""Detects dead upstream connections: records the probes of silent peers, and selects the peers to probe now.

A silent response is usually a slow one: a prefill, or a queue before it. It may also be a response that no process computes any
more. A vLLM that is told to stop may lose its engine core before its server. The server then closes its port, but leaves its
connections open and sends nothing on them. So while connections are silent, the gateway probes whether their peer still accepts
new connections. A refused connection is the only definite sign, and it counts when two probes in a row are refused. A server
that is busy, stopped or far away does not answer the probe at all. A vLLM that still computes has its port open, also while it
drains.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

# Silence after which a peer is probed, s. It is longer than a busy engine takes between two tokens, so that most streams
# are never probed.
SILENT_S = 3.0
PROBE_EVERY_S = 2.0  # from a probe that was not refused to the next probe
REPROBE_S = 1.0  # from a refused probe to the next probe
REFUSALS = 2  # refused probes in a row after which a peer is dead

# A socket's address: host and port; for IPv6 also flow info and scope id.
Peer = tuple[str, int] | tuple[str, int, int, int]


@dataclass(slots=True)
class _Known:
    refusals: int = 0
    due: float = -math.inf  # time of the next probe; infinite while a probe is under way


class DeadConnectionDetector:
    """Probe results of the peers of silent connections. Each peer has at most one probe under way."""

    def __init__(self) -> None:
        self._known: dict[Peer, _Known] = {}

    def due(self, silent: Collection[Peer], now: float) -> list[Peer]:
        """Return the peers to probe now. `silent`: all peers with a connection that has been silent for SILENT_S; the other peers
        are removed when their next probe is due. Mutates."""
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
        """Record the result of a probe of `peer`, which due() returned. Mutates."""
        known = self._known[peer]
        known.refusals = known.refusals + 1 if refused else 0
        known.due = now + (REPROBE_S if refused else PROBE_EVERY_S)

    def is_dead(self, peer: Peer) -> bool:
        """Whether `peer` has refused REFUSALS probes in a row."""
        return peer in self._known and self._known[peer].refusals >= REFUSALS
