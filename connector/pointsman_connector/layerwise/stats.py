"""Counts of layer-wise pushes, in addition to upstream's own transfer statistics."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats

# Each key has a list, as upstream's keys do: `aggregate` joins the lists of two intervals.
PUSHES, FALLBACKS = "num_pushed_regions", "num_push_fallbacks"


@dataclass
class LayerwiseStats(MooncakeKVConnectorStats):
    """Upstream's statistics, in which each push is one transfer, and two more: the number of regions of each push, and the number
    of receivers that were served after the prefill because a push had failed or was too late."""

    def reset(self) -> None:
        """Start an interval."""
        super().reset()
        self.data[PUSHES] = []
        self.data[FALLBACKS] = []

    def record_push(self, regions: int) -> None:
        """Count a completed write of `regions` regions, during its prompt's computation or directly after."""
        with self._lock:
            self.data[PUSHES].append(regions)

    def record_fallback(self) -> None:
        """Count a receiver that did not have all blocks when its prompt was computed."""
        with self._lock:
            self.data[FALLBACKS].append(1)

    def clone_and_reset(self) -> LayerwiseStats:
        """Return the statistics of this interval and start a new one."""
        with self._lock:
            taken = {name: list(values) for name, values in self.data.items()}
            self.reset()
        return LayerwiseStats(data=taken)

    def is_empty(self) -> bool:
        """Return whether the interval has no events."""
        return super().is_empty() and not self.data[PUSHES] and not self.data[FALLBACKS]

    def reduce(self) -> dict[str, int | float]:
        """Return a summary of the interval for the engine's log."""
        pushes = self.data[PUSHES]
        return super().reduce() | {
            "Num pushes": len(pushes),
            "Avg regions per push": round(sum(pushes) / len(pushes), 1) if pushes else 0,
            "Num push fallbacks": len(self.data[FALLBACKS]),
        }
