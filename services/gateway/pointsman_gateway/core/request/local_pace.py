"""How fast this gateway process places at each instance while no router does, and what it has open there. Pure."""

from __future__ import annotations

# A local placement takes one unit of its instance's bucket for each UNIT_TOKENS prompt tokens begun. UNITS_PER_S of them are
# 65,536 prompt tokens per second, about what the fastest instances prefill: the pace holds up nothing that an instance could
# begin to compute at once, and a crowd arrives as fast as it can be served. BURST_UNITS are a quarter of a second of it.
UNIT_TOKENS = 2_048
UNITS_PER_S, BURST_UNITS = 32.0, 8.0
# Maximum number of this process's requests without a first byte at an instance that gets local placements. Without a router the
# gateway has no reports of instances, and this is what it knows of their queues: a slower instance gets fewer requests.
MAX_WAITING = 32
# Number of failures in a row after which an instance gets local placements last, and for how long at most, s.
FAILURES, LONGEST_PAUSE_S = 3, 30.0
# How long a request without a byte was open that is given up, for its instance to have failed, s.
SILENT_S = 10.0


class LocalPace:
    """Open requests of each instance, those among them without a first byte, and the buckets of local placements. As in engines,
    each sequence of a request counts."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}  # number of open requests by instance id, without zeros
        self._waiting: dict[str, int] = {}
        # Instance id -> units that were left, and when. A bucket that is not listed is full. A placement may overdraw its bucket,
        # since a prompt may cost more than a whole one.
        self._buckets: dict[str, tuple[float, float]] = {}
        # Instance id -> number of its requests that failed in a row, and until when it gets local placements last.
        self._failing: dict[str, tuple[int, float]] = {}

    def opened(self, instance_id: str, sequences: int = 1) -> None:
        """Record that a request without a first byte is open at an instance. Mutates."""
        self.open[instance_id] = self.open.get(instance_id, 0) + sequences
        self._waiting[instance_id] = self._waiting.get(instance_id, 0) + sequences

    def began(self, instance_id: str, sequences: int = 1) -> None:
        """Record that a request at an instance has its first byte. Mutates."""
        _subtract(self._waiting, instance_id, sequences)

    def closed(self, instance_id: str, sequences: int = 1, *, began: bool) -> None:
        """Record that a request is not open at an instance any more. `began`: it had its first byte. Mutates."""
        _subtract(self.open, instance_id, sequences)
        if not began:
            _subtract(self._waiting, instance_id, sequences)

    def answered(self, instance_id: str) -> None:
        """Record that an instance answers. Mutates."""
        self._failing.pop(instance_id, None)

    def failed(self, instance_id: str, now: float) -> None:
        """Record that a request failed at an instance: no connection, no byte for long, or an error for what another one answers.
        After FAILURES in a row it gets local placements last, for a time that doubles with each further one. Mutates."""
        count = self._failing.get(instance_id, (0, 0.0))[0] + 1
        pause_s = min(2.0 ** min(count - FAILURES, 30), LONGEST_PAUSE_S) if count >= FAILURES else 0.0
        self._failing[instance_id] = count, now + pause_s

    def fails(self, instance_id: str, now: float) -> bool:
        """Return whether an instance is to get local placements last."""
        return bool(self._failing) and self._failing.get(instance_id, (0, 0.0))[1] > now

    def has_room(self, instance_id: str, now: float) -> bool:
        """Return whether the instance may get a local placement at `now`, s."""
        return self._waiting.get(instance_id, 0) < MAX_WAITING and self._units(instance_id, now) > 0

    def place(self, instance_id: str, tokens: int, now: float, sequences: int = 1) -> None:
        """Record a local placement of `tokens` prompt tokens, which is open from now on. Mutates."""
        units = self._units(instance_id, now) - max(-(-tokens // UNIT_TOKENS), 1)
        self._buckets[instance_id] = units, now
        self.opened(instance_id, sequences)

    def drop_full_buckets(self, now: float) -> None:
        """Forget the buckets that are full again. Mutates."""
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if self._units(name, now) < BURST_UNITS}

    def _units(self, instance_id: str, now: float) -> float:
        if (bucket := self._buckets.get(instance_id)) is None:
            return BURST_UNITS
        units, at = bucket
        return min(units + (now - at) * UNITS_PER_S, BURST_UNITS)


def _subtract(counts: dict[str, int], instance_id: str, sequences: int) -> None:
    left = counts.get(instance_id, 0) - sequences
    if left > 0:
        counts[instance_id] = left
    else:
        counts.pop(instance_id, None)
