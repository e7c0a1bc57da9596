"""Writes to other engines' memory, waited for asleep. Knows the transfer engine by its shape only."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

# After so long the transport gives a write up.
WRITE_S = float(os.environ.get("MC_TRANSFER_TIMEOUT", "30"))

# Of the time that a write is expected to take, how much the waiting thread sleeps. The rest is the engine's own wait.
SLEEP_SHARE = 0.8
# A shorter sleep costs as much as it saves.
SHORTEST_SLEEP_S = 0.0002
# Smaller writes tell nothing of a link's speed.
MEASURABLE_BYTES = 1 << 18
# Asking after a write that has landed takes less CPU time than this.
QUERY_CPU_S = 0.0002
# What a new measurement counts beside all earlier ones.
NEW_SPEED_WEIGHT = 0.25


class TransferEngine(Protocol):
    """What of mooncake.engine.TransferEngine is used."""

    def batch_transfer_sync_write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """0 when all is written; asks without pause until then."""

    def batch_transfer_async_write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """A batch's id; 0 when it could not be begun."""

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        """0 when all of the batches are written, negative when one failed or WRITE_S have passed since it began. Asks without
        pause until then; the ids are free afterwards."""


class SleepingTransferEngine:
    """A transfer engine whose `batch_transfer_sync_write` sleeps through most of the time that the write takes.

    Mooncake's own keeps a core busy all the while. Its asynchronous calls have no question that does not wait, but for
    `transfer_check_status`, which tells only of a batch's first piece: so the thread sleeps for most of the time that so many
    bytes took lately on the way to that host, and asks then. All else is the engine's.
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._engine = engine
        self._sleep = sleep
        self._clock = clock
        self._cpu_clock = cpu_clock
        # Bytes per second by host. Several threads write: one may overwrite what another has just learned, which does no harm.
        self._speeds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def batch_transfer_sync_write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Write `lengths` bytes from each of `src` to each of `dst` at `session` (host:port): 0 when they are there, else
        negative, at the latest WRITE_S and a nanosecond per byte after the beginning."""
        size, host = sum(lengths), session.rpartition(":")[0]
        began = self._clock()
        batch = self._engine.batch_transfer_async_write(session, src, dst, lengths)
        if not batch:
            # The synchronous call also forgets what it knew of a peer that is gone.
            return self._engine.batch_transfer_sync_write(session, src, dst, lengths)
        rest = self._sleep_s(host, size)
        if rest:
            self._sleep(rest)
        asked = self._cpu_clock()
        status = self._engine.get_batch_transfer_status([batch])
        if status == 0 and size >= MEASURABLE_BYTES:
            landed_asleep = rest > 0 and self._cpu_clock() - asked < QUERY_CPU_S
            self._learn(host, size / rest if landed_asleep else size / (self._clock() - began), at_least=landed_asleep)
        return status

    def _sleep_s(self, host: str, size: int) -> float:
        """How long to sleep through a write of `size` bytes, in s: not at all through a short one, or on an unknown link."""
        rest = SLEEP_SHARE * min(size / self._speeds.get(host, math.inf), WRITE_S)
        return rest if rest >= SHORTEST_SLEEP_S else 0.0

    def _learn(self, host: str, speed: float, *, at_least: bool) -> None:
        """A write to `host` went at `speed` bytes per second, or at_least at that."""
        before = self._speeds.get(host)
        if before is None:
            # The first write also opened the connection: it tells nothing.
            self._speeds[host] = math.inf
        elif at_least or before == math.inf:
            self._speeds[host] = speed
        else:
            self._speeds[host] = before + NEW_SPEED_WEIGHT * (speed - before)
