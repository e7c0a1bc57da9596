"""Writes to other engines' memory whose threads sleep while they wait. Does not import the transfer engine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

# Timeout of a write in the transport, s.
WRITE_S = float(os.environ.get("MC_TRANSFER_TIMEOUT", "30"))


def queued_pieces(setting: str) -> int:
    """Return how many pieces Mooncake's queue for a receiver has room for with this MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER. It
    takes its own value for one that is not a number from 1 to 65,535."""
    size = int(setting) if setting.isascii() and setting.isdigit() else 0
    return size if 1 <= size <= 65_535 else 1_024


# Maximum number of pieces that the transport is given at once. Each of vLLM's sender threads (`num_workers`, 10 by default) may
# have a write in the queue for one receiver.
MAX_PIECES = max(1, queued_pieces(os.environ.get("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")) // 16)

# Time for which vLLM's receivers wait for a sender's next message, s beyond the abort timeout. It cannot be set.
PATIENCE_S = 60.0
# For a message's way to the sender, and for the nanosecond per byte that the transport adds to its timeout, s.
MARGIN_S = 2.0

# Share of a write's expected duration for which the waiting thread sleeps. For the rest the engine's own call waits.
SLEEP_SHARE = 0.8
# Minimum sleep, s. A shorter one costs as much as it saves.
SHORTEST_SLEEP_S = 0.0002
# Minimum size of a write from which a link's speed is measured, bytes.
MEASURABLE_BYTES = 1 << 18
# Maximum CPU time of a status query for a write that is already complete, s.
QUERY_CPU_S = 0.0002
# Weight of a new measurement in the moving average of a link's speed.
NEW_SPEED_WEIGHT = 0.25


class Sources(list[int]):
    """Source addresses of a write, and `latest`: the time after which no part of it may start, s of time.monotonic(). vLLM's own
    code passes them on from the sender's event loop to the thread that writes."""

    def __init__(self, addresses: Iterable[int], latest: float) -> None:
        super().__init__(addresses)
        self.latest = latest


def patience_s(abort_s: float, write_s: float = WRITE_S) -> float:
    """Return how long a receiver waits for a sender's next message, in s, by the abort timeout and that of a write."""
    return abort_s + min(3 * write_s, PATIENCE_S)


def last_start_s(abort_s: float, write_s: float = WRITE_S) -> float:
    """Return how long after a receiver's message a part of a write to it may start, in s; negative if none may. The receiver
    waits until it has ended. Receivers of version 0.1 wait only two write timeouts longer than the abort timeout."""
    return min(abort_s + write_s, patience_s(abort_s, write_s) - MARGIN_S - write_s)


class TransferEngine(Protocol):
    """The methods of mooncake.engine.TransferEngine that this package uses."""

    def batch_transfer_sync_write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Write and busy-wait until the end; return 0 if all is written."""

    def batch_transfer_async_write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Start a write; return its batch id, or 0 if it could not be started."""

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        """Busy-wait until the batches have ended. Return 0 if all are written, a negative value if one failed or WRITE_S have
        passed since its start. The ids are free afterwards."""


class SleepingTransferEngine:
    """A transfer engine whose `batch_transfer_sync_write` sleeps for most of the duration of the write.

    Mooncake's own method keeps a core busy until the end. Its asynchronous API has no status query that does not wait, except
    `transfer_check_status`, which reports only on a batch's first piece. So the thread sleeps for most of the duration that
    recent writes to the same host suggest for the size, then queries the status. A write of more than MAX_PIECES is made in
    parts, one after the other. All other methods are the engine's.
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._engine = engine
        self._sleep = sleep
        self._clock = clock
        self._cpu_clock = cpu_clock
        # Bytes per second by host. Several threads write here. A lost update of one of them does no harm.
        self._speeds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def batch_transfer_sync_write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Write `lengths` bytes from each of `src` to each of `dst` at `session` (host:port). Return 0 if all is written, else a
        negative value. A part starts at the latest WRITE_S after the first one, and not after `src.latest` if `src` are
        Sources. It takes at most WRITE_S and a nanosecond per byte."""
        latest = min(getattr(src, "latest", math.inf), self._clock() + WRITE_S)
        for start in range(0, len(src), MAX_PIECES):
            # A write may have waited for a thread, and a process that was stopped may resume here.
            if self._clock() > latest:
                return -1
            part = slice(start, start + MAX_PIECES)
            if status := self._write(session, src[part], dst[part], lengths[part]):
                return status
        return 0

    def _write(self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]) -> int:
        size, host = sum(lengths), session.rpartition(":")[0]
        known, began = host in self._speeds, self._clock()
        batch = self._engine.batch_transfer_async_write(session, src, dst, lengths)
        if not batch:
            # The synchronous call also drops the engine's cached state of a peer that has ended.
            return self._engine.batch_transfer_sync_write(session, src, dst, lengths)
        rest = self._sleep_s(host, size)
        if rest:
            self._sleep(rest)
        asked = self._cpu_clock()
        status = self._engine.get_batch_transfer_status([batch])
        if status == 0 and size >= MEASURABLE_BYTES:
            landed_asleep = rest > 0 and self._cpu_clock() - asked < QUERY_CPU_S
            if known:
                self._learn(
                    host, size / rest if landed_asleep else size / (self._clock() - began), at_least=landed_asleep
                )
            else:
                # The first writes also wait until the connection is open, so their duration is no measure of the speed.
                self._speeds.setdefault(host, math.inf)
        return status

    def _sleep_s(self, host: str, size: int) -> float:
        """Return how long to sleep during a write of `size` bytes, in s; 0 for a short write and for an unknown link."""
        rest = SLEEP_SHARE * min(size / self._speeds.get(host, math.inf), WRITE_S)
        return rest if rest >= SHORTEST_SLEEP_S else 0.0

    def _learn(self, host: str, speed: float, *, at_least: bool) -> None:
        """Record the speed of a write to `host`, in bytes per second. `at_least`: the real speed may be higher. Mutates."""
        before = self._speeds[host]
        if at_least or before == math.inf:
            self._speeds[host] = speed
        else:
            self._speeds[host] = before + NEW_SPEED_WEIGHT * (speed - before)
