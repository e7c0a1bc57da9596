"""Reporting of one instance during one incarnation: cached blocks, KV subscriber, state file, and one reporter per router."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import zmq.asyncio
from msgspec.structs import replace

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.suspension import Reset
from pointsman_agent.core.warning_limit import WarningLimit
from pointsman_agent.io.kv_subscriber import KvEventSource, KvSubscriber
from pointsman_agent.io.report_to_router import Reporter
from pointsman_agent.io.state_file import SavedState, StateFile, restore_cached_blocks, to_saved_state
from pointsman_common.io.auth import CallMetadata
from pointsman_common.io.channel import ReloadingChannel

log = structlog.get_logger()

# The pause after a save is this multiple of the save's duration, so that saving takes at most 1/200 of the time, but not longer
# than MAX_PAUSE_S: a restarted agent replays what came since, of which engines keep 10,000 steps as documented.
SAVE_SHARE, MAX_PAUSE_S = 200, 120.0
# Minimum interval between two logged failures to save an instance's state, s.
UNSAVED_INTERVAL_S = 600.0


@dataclass(frozen=True, slots=True)
class AgentContext:
    """Resources and settings that all instances of an agent share."""

    channels: Mapping[str, ReloadingChannel]  # HOST:PORT of each router replica -> the agent's only channel to it
    metadata: CallMetadata  # returns the metadata of a call that starts now: the agent's token
    zmq: zmq.asyncio.Context  # of the sockets of all KV-event subscriptions
    agent_id: str  # HOST-PID, as routers receive it in Hello
    state_dir: Path  # folder of the instances' state files
    report_interval_s: float  # time between two scrapes of an engine, which Hello tells as that between two loads
    consistency_check_interval_s: float  # time between two digests of an instance's keys that each router gets
    save_interval_s: float  # minimum time between two saves of an instance's state


class InstanceMonitor:
    """Follows one instance from `prepare` to `stop`, and reports it from `start` on.

    If `instance.incarnation` is empty, `prepare` sets it to `process` or, if that is empty too, to a random name. `process` is
    the engine's identity, empty if the engine does not report one. `saw_start` means that this agent saw the incarnation begin,
    so no router can know it yet. `ended` is set, with `end_reason`, when the KV events show that the incarnation has ended or a
    task of this object failed. The owner then starts another object, and stops this one.
    """

    def __init__(
        self,
        agent_context: AgentContext,
        instance: pb.Instance,
        source: KvEventSource | None,
        *,
        process: str,
        capacity_blocks: int,
        speculative: bool,
        saw_start: bool,
    ) -> None:
        self.instance = instance
        self.source = source
        self.ended = asyncio.Event()
        self.end_reason = ""
        self.reporters: list[Reporter] = []
        self._agent_context = agent_context
        self._process = process
        self._capacity_blocks = capacity_blocks
        self._speculative = speculative
        self._saw_start = saw_start
        self._file = StateFile(agent_context.state_dir, instance.instance_id)
        self.cached_blocks = self._empty()
        self.subscriber: KvSubscriber | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._saving: asyncio.Future[bool] | None = None
        self._unsaved = WarningLimit(UNSAVED_INTERVAL_S)
        self._saved: tuple[int, int] | None = None
        # How many resets events had told of when its cache was last known.
        self._resets_before = 0
        self._load: tuple[pb.Load, float] | None = None
        self._log = log.bind(instance=instance.instance_id)

    async def prepare(self) -> None:
        """Restore the saved state, subscribe to KV events, and catch up by replay."""
        if not self.instance.incarnation:
            self.instance.incarnation = self._process or new_incarnation("")
        if self.source is not None:
            await self._follow(self.source)
        self.cache_is_known()
        self._log.info(
            "instance found",
            incarnation=self.instance.incarnation,
            model=self.instance.model,
            block_size=self.instance.block_size,
            prefix_mode=pb.PrefixMode.Name(self.instance.prefix_mode),
            prefix_reason=self.instance.prefix_reason,
            keys=self.cached_blocks.key_count,
            seq=self.cached_blocks.latest_seq,
        )

    def start(self) -> None:
        """Start to report the instance, and to follow its KV events."""
        self.reporters = [
            Reporter(
                router,
                channel,
                self._agent_context.metadata,
                self.cached_blocks,
                self.instance,
                self._agent_context.agent_id,
                consistency_check_interval_s=self._agent_context.consistency_check_interval_s,
                report_interval_s=self._agent_context.report_interval_s,
            )
            for router, channel in self._agent_context.channels.items()
        ]
        if self._load is not None:
            self.report_load(*self._load)
        if self.subscriber is not None:
            self._tasks = [
                asyncio.create_task(self._run_subscriber(self.subscriber)),
                asyncio.create_task(self._save_often()),
            ]
        for task in (*self._tasks, *(reporter.task for reporter in self.reporters)):
            task.add_done_callback(self._task_done)

    async def stop(self, ended: str = "", *, goodbye: bool = True) -> None:
        """Stop all tasks and reporters. `ended`: why the incarnation has ended. If it is empty, the engine still runs, and the
        state is saved for the next agent. `goodbye`: whether routers remove an instance that has ended; they need not if another
        incarnation is reported next."""
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(
                *(reporter.stop(ended if goodbye else "") for reporter in self.reporters), return_exceptions=True
            )
            if self._saving is not None:
                # A save in progress must not finish after the last save.
                await asyncio.wait([self._saving])
            if self.subscriber is not None and not ended:
                self._save(self._capture(self.subscriber, clean=True))
        finally:
            if self.subscriber is not None:
                self.subscriber.close()
        if ended:
            self._log.info("the instance has ended", incarnation=self.instance.incarnation, reason=ended)

    def end(self, reason: str) -> None:
        """Note that the incarnation has ended, and its cache with it. It is reported as before until `stop`."""
        self.drop_keys(reason)
        self.end_reason = reason
        self.ended.set()

    @property
    def process(self) -> str:
        """The engine's identity; empty if the engine does not report one."""
        return self._process

    def report_load(self, load: pb.Load, taken_at: float) -> None:
        """Send a new load, sampled at `taken_at`, to all routers."""
        load.events_problem = self.subscriber.problem if self.subscriber is not None else ""
        self._load = (load, taken_at)
        for reporter in self.reporters:
            reporter.load(load, taken_at)

    @property
    def events_at(self) -> float:
        """When the last KV events arrived, on time.monotonic()'s clock; -inf if there were none."""
        return self.subscriber.arrived_at if self.subscriber is not None else -math.inf

    @property
    def suspended(self) -> str:
        """Why the engine computes nothing; empty if it computes or nothing is known."""
        return self._load[0].suspended if self._load is not None else ""

    def drop_keys(self, reason: str) -> None:
        """Remove all keys, because the engine has reset its cache. Its own event follows with the next step."""
        if not self.cached_blocks.empty:
            self._log.info("the instance's keys are dropped", reason=reason, keys=self.cached_blocks.key_count)
            self.cached_blocks.clear()
            self._changed()

    def cache_is_known(self) -> None:
        """Note that the engine's cache is as events have told: an event that tells of a later reset comes after these."""
        self._resets_before = self.cached_blocks.counts.resets

    def cache_was_reset(self, reset: Reset, *, late: bool) -> None:
        """Remove all keys, unless events have told of the reset: then the keys are newer. `late`: what shows the reset may be
        from before such events, and be reported again."""
        by_events = self.cached_blocks.counts.resets > self._resets_before and (reset.over or late)
        if not by_events:
            self.drop_keys(reset.reason)
        if not (by_events and late):
            self.cache_is_known()

    def describe(self, instance: pb.Instance) -> None:
        """Send the instance's changed fixed properties to all routers."""
        self.instance = instance
        for reporter in self.reporters:
            reporter.describe(instance)

    async def _follow(self, source: KvEventSource) -> None:
        """Create cached blocks and subscriber, from the file if the file is of this lifetime and the publisher confirms that."""
        state = await asyncio.to_thread(self._restorable)
        if state is not None:
            self.instance.incarnation = state.incarnation
        elif not self._saw_start:
            # Routers may know this incarnation from an agent whose file is lost. Its sequence numbers must not be reused.
            self.cached_blocks.latest_seq = int(time.time() * 1e3) << 20
        self.subscriber = KvSubscriber(
            self._agent_context.zmq,
            source,
            self.cached_blocks,
            self._changed,
            applied=state.applied if state is not None else -1,
            applied_digest=state.applied_digest if state is not None else 0,
        )
        if not await self.subscriber.start():
            self._log.warning(
                "the saved state is of another process; starting empty", incarnation=self.instance.incarnation
            )
            self.subscriber.close()
            self.instance.incarnation = new_incarnation(self._process)
            seq = self.cached_blocks.latest_seq + 1
            self.cached_blocks = self._empty(seq)
            self.subscriber = KvSubscriber(self._agent_context.zmq, source, self.cached_blocks, self._changed)
            await self.subscriber.start()
        self._changed()

    def _empty(self, latest_seq: int = 0) -> CachedBlocks:
        return CachedBlocks(
            self.instance.model,
            capacity_blocks=self._capacity_blocks,
            speculative=self._speculative,
            latest_seq=latest_seq,
        )

    def _restorable(self) -> SavedState | None:
        """Return the saved state if it is of this incarnation, after restoring its blocks and marking its file as not clean. A
        file that is damaged, or cannot be read or written, is logged and ignored."""
        try:
            state = self._file.load()
            if state is None or self._saw_start:
                return None
            if state.process != self._process or state.model != self.instance.model:
                return None
            cached_blocks = restore_cached_blocks(
                state, capacity_blocks=self._capacity_blocks, speculative=self._speculative
            )
            # From now on routers may receive deltas that the file does not have.
            self._file.save(replace(state, clean=False))
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            reason = f"{type(error).__name__}: {error}"
            self._log.warning("the saved state cannot be used", path=str(self._file.path), reason=reason)
            return None
        self.cached_blocks = cached_blocks
        return state

    def _changed(self) -> None:
        if self.cached_blocks.unusable_reason and self.instance.prefix_mode != pb.PREFIX_MODE_NONE:
            self.instance.prefix_mode = pb.PREFIX_MODE_NONE
            self.instance.prefix_reason = self.cached_blocks.unusable_reason
            self.instance.events_unusable = True
            self._log.warning("the instance's prefixes cannot be known", reason=self.cached_blocks.unusable_reason)
            for reporter in self.reporters:
                reporter.describe(self.instance)
        elif self.cached_blocks.grouped is not None and not self.instance.sparse_prefixes:
            self.instance.sparse_prefixes = True
            self._log.info("the model has several KV cache groups", groups=str(self.cached_blocks.grouped.groups))
            for reporter in self.reporters:
                reporter.describe(self.instance)
        if self.subscriber is not None and self.subscriber.looks_ahead and not self.instance.uncertain_blocks:
            self.instance.uncertain_blocks = 1
            self._log.info("the engine's block hashes cover the tokens after a block: a prefix's last block can miss")
            for reporter in self.reporters:
                reporter.describe(self.instance)
        for reporter in self.reporters:
            reporter.changed()

    async def _run_subscriber(self, subscriber: KvSubscriber) -> None:
        await subscriber.run()
        self.end_reason = "its KV events started over"
        self.ended.set()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._log.error("a task of the instance failed", task=task.get_name(), exc_info=error)
        self.end_reason = f"{type(error).__name__} in its agent"
        self.ended.set()

    async def _save_often(self) -> None:
        assert self.subscriber is not None
        interval_s = pause_s = self._agent_context.save_interval_s
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            position = (self.subscriber.applied, self.cached_blocks.latest_seq)
            if position == self._saved:
                continue
            state = self._capture(self.subscriber, clean=False)
            self._saving = asyncio.ensure_future(asyncio.to_thread(self._save, state))
            if await asyncio.shield(self._saving):
                self._saved = position
            pause_s = max(interval_s, min(SAVE_SHARE * (time.monotonic() - began), MAX_PAUSE_S))

    def _save(self, state: SavedState) -> bool:
        """Write the file; return whether that succeeded."""
        try:
            self._file.save(state)
        except OSError as error:
            if times := self._unsaved.occurred(time.monotonic()):
                reason = error.strerror or str(error)
                self._log.error("the state cannot be saved", path=str(self._file.path), reason=reason, times=times)
            return False
        return True

    def _capture(self, subscriber: KvSubscriber, *, clean: bool) -> SavedState:
        return to_saved_state(
            self.cached_blocks,
            clean=clean,
            process=self._process,
            incarnation=self.instance.incarnation,
            applied=subscriber.applied,
            applied_digest=subscriber.applied_digest,
        )


def new_incarnation(process: str) -> str:
    """Return a random name for a lifetime whose process identity is missing or was used by an earlier lifetime."""
    return f"{process or 'anonymous'}-{secrets.token_hex(4)}"
