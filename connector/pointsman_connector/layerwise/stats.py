"""Counts of layer-wise pushes, in addition to upstream's own transfer statistics."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats

from pointsman_connector.layerwise.kv_checks import CHECKED, LATE, WRONG_FROM

# Each key has a list, as upstream's keys do: `aggregate` joins the lists of two intervals.
PUSHES, FALLBACKS = "num_pushed_regions", "num_push_fallbacks"


@dataclass
class LayerwiseStats(MooncakeKVConnectorStats):
    """Upstream's statistics, in which each push is one transfer, and two more: the number of regions of each push, and the number
    of receivers that were served after the prefill because a push had failed or was too late."""

    def __post_init__(self) -> None:
        # A worker on which layer-wise push is off has upstream's statistics.
        super().__post_init__()
        for name in (PUSHES, FALLBACKS, CHECKED):
            self.data.setdefault(name, [])

    def reset(self) -> None:
        """Start an interval."""
        super().reset()
        self.data[PUSHES] = []
        self.data[FALLBACKS] = []
        self.data[CHECKED] = []
        self.data[LATE] = []

    def record_push(self, regions: int) -> None:
        """Count a completed write of `regions` regions, during its prompt's computation or directly after."""
        with self._lock:
            self.data[PUSHES].append(regions)

    def record_fallback(self) -> None:
        """Count a receiver that did not have all blocks when its prompt was computed."""
        with self._lock:
            self.data[FALLBACKS].append(1)

    def record_check(self, *, late: bool = False) -> None:
        """Count a request whose KV was checked. `late`: the KV arrived after the answer that it is written."""
        with self._lock:
            self.data[CHECKED].append(1)
            if late:
                self.data[LATE].append(1)

    def record_wrong(self, sender: str, engine_id: str) -> None:
        """Count a request whose KV never had the sender's checksums. `sender`: URL of the sending engine's bootstrap server;
        `engine_id`: the sending engine's id."""
        with self._lock:
            self.data.setdefault(f"{WRONG_FROM}{sender} {engine_id}", []).append(1)

    def clone_and_reset(self) -> LayerwiseStats:
        """Return the statistics of this interval and start a new one."""
        with self._lock:
            taken = {name: list(values) for name, values in self.data.items()}
            self.reset()
        return LayerwiseStats(data=taken)

    def aggregate(self, other: KVConnectorStats) -> LayerwiseStats:
        """Add another worker's interval; returns self."""
        for name, values in other.data.items():
            self.data.setdefault(name, []).extend(values)
        return self

    def is_empty(self) -> bool:
        """Nothing happened in the interval."""
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """Return a summary of the interval for the engine's log."""
        pushes = self.data[PUSHES]
        return super().reduce() | {
            "Num pushes": len(pushes),
            "Avg regions per push": round(sum(pushes) / len(pushes), 1) if pushes else 0,
            "Num push fallbacks": len(self.data[FALLBACKS]),
            "Num checked requests": len(self.data[CHECKED]),
            "Num requests with wrong KV": sum(
                len(values) for name, values in self.data.items() if name.startswith(WRONG_FROM)
            ),
        }
