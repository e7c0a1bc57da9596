"""Counts of layer-wise pushes beside upstream's own transfer statistics."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats

# Each key holds a list, as upstream's do: lists of two intervals are joined by `aggregate`.
PUSHES, FALLBACKS = "num_pushed_regions", "num_push_fallbacks"


@dataclass
class LayerwiseStats(MooncakeKVConnectorStats):
    """Upstream's statistics (each push is one of its transfers), with how many regions each push wrote and how many receivers
    were served after the prefill because a push had failed or come too late."""

    def reset(self) -> None:
        """Start an interval."""
        super().reset()
        self.data[PUSHES] = []
        self.data[FALLBACKS] = []

    def record_push(self, regions: int) -> None:
        """One write of `regions` regions landed while its prompt was computed, or right after."""
        with self._lock:
            self.data[PUSHES].append(regions)

    def record_fallback(self) -> None:
        """A receiver did not have everything when its prompt was done."""
        with self._lock:
            self.data[FALLBACKS].append(1)

    def clone_and_reset(self) -> LayerwiseStats:
        """This interval's statistics; a new one begins."""
        with self._lock:
            taken = {name: list(values) for name, values in self.data.items()}
            self.reset()
        return LayerwiseStats(data=taken)

    def is_empty(self) -> bool:
        """Nothing happened in the interval."""
        return super().is_empty() and not self.data[PUSHES] and not self.data[FALLBACKS]

    def reduce(self) -> dict[str, int | float]:
        """The interval in a few numbers, for the engine's log."""
        pushes = self.data[PUSHES]
        return super().reduce() | {
            "Num pushes": len(pushes),
            "Avg regions per push": round(sum(pushes) / len(pushes), 1) if pushes else 0,
            "Num push fallbacks": len(self.data[FALLBACKS]),
        }
