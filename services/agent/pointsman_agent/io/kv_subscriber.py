"""Applies KV events from an engine's ZMQ sockets to cached blocks: SUB for live events, DEALER to replay missed ones."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

import msgspec
import structlog
import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.event_order import BatchAction, EventOrder
from pointsman_agent.core.kv_events import (
    BlockStored,
    decode_batch,
    decode_seq,
    encode_seq,
    lifetime_of,
    unknown_fields,
)
from pointsman_agent.core.warning_limit import WarningLimit
from pointsman_agent.io.zmq_sockets import needs_ipv6

log = structlog.get_logger()

# Timeout for the next message of a replay, s. The engine's publisher answers a replay between two batches, or after 0.1 s
# without a batch.
REPLAY_SILENCE_S = 5.0
# Time without an event after which the subscriber requests a replay of what follows the last one, s. Batches lost at the end of a
# broken connection leave no gap in the sequence.
TAIL_CHECK_S = 5.0
# Time until the first of these checks, s; it doubles up to TAIL_CHECK_S. A subscription takes effect some time after the first
# replay. A batch that an engine publishes in between is missed, and no gap shows it while the engine is idle.
FIRST_TAIL_CHECK_S = 0.2
# Maximum number of replays to catch up. ZeroMQ's default send queue has 1,000 messages and drops the rest, so a replay of 10,000
# can need several requests.
MAX_REPLAYS = 100
# Number of batches after which other tasks of the event loop may run.
FAIR_BATCHES = 32
# Pause after the batches that have arrived, s. A busy engine publishes one at each step, and waiting for the next takes more CPU
# time than applying it. The first after a silence is applied at once.
READ_INTERVAL_S = 0.05
# Minimum interval between two warnings that events do not arrive or cannot be read, s.
PROBLEM_INTERVAL_S = 600.0
# Fields that are not known are looked for in the first batches, and then in one of so many.
FIELD_CHECKS = 64
# What decoding raises for bytes that are no batch, for a text that is not UTF-8, and for a value that is nested too deep.
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """ZMQ addresses to connect to. `replay` is empty if the engine has no replay buffer."""

    events: str
    replay: str = ""
    topic: str = ""


@dataclass(slots=True)
class SubscriberCounts:
    """Counts of gaps in the live sequence, gaps that no replay filled, failed replays, and batches that cannot be decoded."""

    gaps: int = 0
    lost: int = 0
    replay_failures: int = 0
    undecodable: int = 0


class ReplayFailed(Exception):
    """A replay ended before its last batch, or did not catch up."""


class KvSubscriber:
    """Follows one publisher for one lifetime.

    `applied` is the number of the last batch in the cached blocks (-1: none), `applied_digest` the XXH3-64 of its payload (0:
    unknown). `on_change` is called after each batch that changed the cached blocks' keys. `problem` says why the newest events
    did not arrive or could not be read; empty if they did. The first time, and rarely after, it is logged.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KvEventSource,
        cached_blocks: CachedBlocks,
        on_change: Callable[[], None],
        *,
        applied: int = -1,
        applied_digest: int = 0,
    ) -> None:
        self.counts = SubscriberCounts()
        self.problem = ""
        self.arrived_at = -math.inf
        """When the last batch arrived, on time.monotonic()'s clock."""
        self.looks_ahead = False
        """Whether the engine hashes blocks with tokens after them."""
        self._problems = WarningLimit(PROBLEM_INTERVAL_S)
        self._unknown: set[str] = set()
        self._lifetime = b""
        self._context = context
        self._source = source
        self._cached_blocks = cached_blocks
        self._on_change = on_change
        self._sequence = EventOrder(applied)
        self._last_digest = applied_digest
        self._last_payload: bytes | None = None
        self._sub: zmq.asyncio.Socket | None = None
        self._log = log.bind(events=source.events)

    @property
    def applied(self) -> int:
        """Number of the last batch in the cached blocks, -1 before the first."""
        return self._sequence.applied

    @property
    def applied_digest(self) -> int:
        """XXH3-64 of the payload of the last batch in the cached blocks; 0 if unknown."""
        return xxh3_64_intdigest(self._last_payload) if self._last_payload is not None else self._last_digest

    async def start(self) -> bool:
        """Subscribe, then catch up by replay. Return False if the publisher is not the one that `applied` is a batch of.

        If the publisher cannot confirm restored cached blocks, they are cleared.
        """
        self._sub = await self._socket(zmq.SUB, self._source.events)
        self._sub.subscribe(self._source.topic.encode())
        if not self._source.replay:
            self._drop("no replay socket to confirm the restored cached blocks")
            self._sequence = EventOrder()
            return True
        try:
            return await self._catch_up()
        except ReplayFailed as failed:
            self._replay_failed(failed)
            self._drop(str(failed))
            self._sequence = EventOrder()
            return True

    async def run(self) -> None:
        """Apply live batches until cancelled. If the publisher starts over, clear the cached blocks and return."""
        assert self._sub is not None
        patience = FIRST_TAIL_CHECK_S
        while True:
            if await self._sub.poll(patience * 1e3):
                if not await self._read_arrived(self._sub):
                    break
                await asyncio.sleep(READ_INTERVAL_S)
                continue
            patience = min(2 * patience, TAIL_CHECK_S)
            if not await self._check_tail():
                break
        self._drop("the publisher started over")

    def close(self) -> None:
        """Close the sockets."""
        if self._sub is not None:
            self._sub.close(linger=0)
            self._sub = None

    async def _read_arrived(self, sub: zmq.asyncio.Socket) -> bool:
        """Handle the live batches that have arrived; return False if the publisher started over."""
        count = 0
        while True:
            try:
                frames = await sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if len(frames) != 3:
                self._refuse(f"a message of {len(frames)} frames")
                continue
            try:
                seq = decode_seq(frames[1])
            except ValueError as error:
                self._refuse(str(error))
                continue
            if self._lifetime and lifetime_of(frames[1]) != self._lifetime:
                return False
            self._lifetime = lifetime_of(frames[1])
            if not frames[2]:
                continue  # A heartbeat.
            if not await self._live(seq, frames[2]):
                return False
            count += 1
            if count % FAIR_BATCHES == 0:
                await asyncio.sleep(0)

    async def _live(self, seq: int, payload: bytes) -> bool:
        """Handle one live batch; return False if the publisher started over."""
        verdict = self._sequence.on_live(seq)
        if verdict is BatchAction.GAP:
            self.counts.gaps += 1
            self._log.info("KV events are missing; requesting a replay", wanted=self.applied + 1, got=seq)
            try:
                if self._source.replay and not await self._catch_up():
                    return False
            except ReplayFailed as failed:
                self._replay_failed(failed)
            verdict = self._sequence.on_live(seq)
            if verdict is BatchAction.GAP:
                self._lose(seq)
                verdict = self._sequence.on_live(seq)
        if verdict is BatchAction.APPLY:
            self._apply(seq, payload)
        return verdict is not BatchAction.RESTART

    async def _check_tail(self) -> bool:
        if not self._source.replay:
            return True
        try:
            return await self._catch_up()
        except ReplayFailed as failed:
            # The engine has ended or is busy, or the address is wrong. The next check retries.
            self._replay_failed(failed)
            return True

    async def _catch_up(self) -> bool:
        """Replay until no batch is missing. Return False if the replay shows another lifetime. Raises ReplayFailed."""
        for _ in range(MAX_REPLAYS):
            if (complete := await self._replay_once()) is not None:
                return complete
        raise ReplayFailed(f"{MAX_REPLAYS} replays were not enough")

    async def _replay_once(self) -> bool | None:
        """Run one replay. Return True if it is complete, False if it shows another lifetime, None if messages were dropped and
        another replay is needed. Raises ReplayFailed.

        The replay starts at the last batch applied. Its payload shows whether this is still the same publisher.
        """
        known = self.applied
        first = True
        async with aclosing(self._replayed(max(known, 0))) as batches:
            async for seq, payload in batches:
                verdict = self._sequence.on_replayed(seq)
                if seq == known and self.applied_digest not in (0, xxh3_64_intdigest(payload)):
                    return False
                if verdict is BatchAction.GAP:
                    if not first:
                        return None
                    self._lose(seq)
                    verdict = BatchAction.APPLY
                first = False
                if verdict is BatchAction.APPLY:
                    self._apply(seq, payload)
                if seq % FAIR_BATCHES == 0:
                    await asyncio.sleep(0)
        # A publisher that has sent `known` and has a buffer always returns at least one batch.
        return not (first and known >= 0)

    async def _replayed(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        # A new socket per replay: late messages of an earlier replay must not be read as part of this one.
        socket = await self._socket(zmq.DEALER, self._source.replay)
        try:
            await socket.send_multipart([b"", encode_seq(start)])
            while True:
                try:
                    async with asyncio.timeout(REPLAY_SILENCE_S):
                        frames = await socket.recv_multipart()
                except TimeoutError:
                    raise ReplayFailed(f"{self._source.replay} did not answer in {REPLAY_SILENCE_S:.0f} s") from None
                if len(frames) < 3:
                    raise ReplayFailed(f"{self._source.replay} answered {len(frames)} frames")
                try:
                    seq = decode_seq(frames[-2])
                except ValueError as error:
                    raise ReplayFailed(f"{self._source.replay} answered {error}") from None
                if seq < 0:
                    if self.problem.startswith(self._source.replay):
                        self.problem = ""
                    return
                if frames[-1]:
                    yield seq, frames[-1]
        finally:
            socket.close(linger=0)

    def _apply(self, seq: int, payload: bytes) -> None:
        self._sequence.mark_applied(seq)
        self.arrived_at = time.monotonic()
        self._last_payload = payload
        try:
            batch = decode_batch(payload)
        except UNDECODABLE as error:
            # The batch may have removed blocks, so the cached blocks before it may be wrong.
            self._refuse(f"batch {seq} cannot be decoded: {error}")
            return
        self.problem = ""
        self._note_unknown(seq, payload, batch.unknown)
        if not self.looks_ahead:
            self.looks_ahead = any(
                isinstance(event, BlockStored) and event.lookahead_token_ids for event in batch.events
            )
        if self._cached_blocks.apply(batch.events):
            self._on_change()

    def _refuse(self, problem: str) -> None:
        """Note that a message cannot be used, which may have removed blocks."""
        self.counts.undecodable += 1
        self._has_problem(problem)
        self._drop(problem)

    def _replay_failed(self, failed: ReplayFailed) -> None:
        self.counts.replay_failures += 1
        self._has_problem(str(failed))

    def _has_problem(self, problem: str) -> None:
        self.problem = problem
        if times := self._problems.occurred(time.monotonic()):
            self._log.warning("KV events do not arrive or cannot be used", reason=problem, times=times)

    def _note_unknown(self, seq: int, payload: bytes, types: Sequence[str]) -> None:
        """Log types and fields of events that are not known, each once."""
        found = set(types)
        if seq < FIELD_CHECKS or seq % FIELD_CHECKS == 0:
            # A batch may have fields that cannot be decoded beside those that are known.
            with suppress(*UNDECODABLE):
                found |= unknown_fields(payload)
        if found := found - self._unknown:
            self._unknown |= found
            self._log.warning(
                "KV events have types or fields that are not known; they are skipped", names=sorted(found)
            )

    def _lose(self, seq: int) -> None:
        """Continue at `seq`: batches before it are lost. Clear the cached blocks, unless no batch was applied yet."""
        lost = self.applied >= 0
        if lost:
            self.counts.lost += 1
            self._drop(f"batches {self.applied + 1} to {seq - 1} are lost")
        self._sequence.skip_to(seq)

    def _drop(self, reason: str) -> None:
        if self._cached_blocks.key_count:
            self._log.warning(
                "the copy of the engine's cache is cleared", reason=reason, keys=self._cached_blocks.key_count
            )
        if self._cached_blocks.clear():
            self._on_change()

    async def _socket(self, kind: int, address: str) -> zmq.asyncio.Socket:
        # A name of which nothing is known: ZMQ looks it up for both families.
        ipv6 = await needs_ipv6(address, unknown=True)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, ipv6)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket
