"""Detects dead upstream connections: records the probes of silent peers, and selects the peers to probe now.

A silent response is usually a slow one: a prefill, or a queue before it. It may also be a response that no process computes any
more. A vLLM that is told to stop may lose its engine core before its server. The server then closes its port, but leaves its
connections open and sends nothing on them. So while connections are silent, the gateway probes whether their peer still accepts
new connections. A refused connection is the only definite sign, and it counts when two probes in a row are refused. A server
that is busy, stopped or far away does not answer the probe at all, and neither does a machine that is gone: no answer counts only
if the router has also lost the instance's agent. A vLLM that still computes has its port open, also while it drains.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass

# Silence after which a peer is probed, s. It is longer than a busy engine takes between two tokens, so that most streams
# are never probed.
SILENT_S = 3.0
PROBE_EVERY_S = 2.0  # from a probe that was not refused to the next probe
REPROBE_S = 1.0  # from a refused probe to the next probe
REFUSALS = 2  # refused probes in a row after which a peer is dead; of a lost peer also unanswered ones

# A socket's address: host and port; for IPv6 also flow info and scope id.
Peer = tuple[str, int] | tuple[str, int, int, int]


class Probe(enum.Enum):
    """What came of a probe. UNANSWERED: neither, in time."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNANSWERED = "unanswered"


@dataclass(slots=True)
class _Known:
    refusals: int = 0  # probes in a row that were refused
    failures: int = 0  # probes in a row that were not accepted
    silent: bool = True  # whether a connection to the peer was silent at the last call of due()
    lost: bool = False  # the router has lost the agent of the peer's instance, and no probe was accepted since
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
                known.refusals, known.failures, known.silent, known.lost = 0, 0, False, False
                if known.due <= now:
                    del self._known[peer]
        asked = []
        for peer in silent:
            known = self._known.setdefault(peer, _Known())
            known.silent = True
            if known.due <= now:
                known.due = math.inf
                asked.append(peer)
        return asked

    def lost(self, peer: Peer) -> None:
        """Record that the router has lost the agent of a peer's instance. No effect for a peer that is not silent. Mutates."""
        if (known := self._known.get(peer)) is not None and known.silent:
            known.lost = True

    def probed(self, peer: Peer, result: Probe, now: float) -> None:
        """Record the result of a probe of `peer`, which due() returned. Mutates."""
        known = self._known[peer]
        known.refusals = known.refusals + 1 if result is Probe.REFUSED else 0
        known.failures = 0 if result is Probe.ACCEPTED else known.failures + 1
        known.lost = known.lost and result is not Probe.ACCEPTED
        known.due = now + (REPROBE_S if result is Probe.REFUSED else PROBE_EVERY_S)

    def is_dead(self, peer: Peer) -> bool:
        """Whether `peer` has refused REFUSALS probes in a row, or, if it is lost, has accepted none of them."""
        known = self._known.get(peer)
        return known is not None and (known.failures if known.lost else known.refusals) >= REFUSALS
