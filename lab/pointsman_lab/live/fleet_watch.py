"""Watches a fleet through its router while a replay runs: samples the instances, and collects all decisions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

import grpc.aio

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_common.io.auth import CallMetadata
from pointsman_common.io.channel import open_channel
from pointsman_common.io.whole_lists import whole_async
from pointsman_lab.report.instance_samples import InstanceSample, sample

# Timeout of one call to the router, s.
CALL_S = 10.0
# Timeout for the outcomes of the last decisions, s. The router receives an outcome after the client's last byte, because the
# gateway sends outcomes in batches.
SETTLE_S = 10.0
# Interval between two checks for outcomes, s.
SETTLE_POLL_S = 0.05
# Pause before a broken stream of decisions is opened again, s.
RETRY_S = 0.5
# Number of the newest decisions that are read at the end.
PAGE = 1_000


class FleetError(RuntimeError):
    """The router cannot be watched; the message names it and says why."""


class FleetWatcher:
    """Samples the instances every `every_s` seconds inside its `async with` block; `clock` returns s since the run's start.

    If the router is unreachable in between, the calls are retried until it is back; `missed` counts the failed samples.
    """

    def __init__(self, address: str, metadata: CallMetadata, every_s: float, clock: Callable[[], float]) -> None:
        self.samples: list[InstanceSample] = []
        self.decisions: dict[str, fleet_pb2.Decision] = {}
        self.missed = 0
        self._address = address
        self._metadata = metadata
        self._every_s = every_s
        self._clock = clock
        self._first: list[fleet_pb2.InstanceStatus] = []
        self._last: list[fleet_pb2.InstanceStatus] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> FleetWatcher:
        """Take the first sample. Raises FleetError if the router does not answer, or if other routers own all pools."""
        self._channel = open_channel(self._address)
        self._fleet: Any = fleet_pb2_grpc.FleetServiceStub(self._channel)
        try:
            await self._sample()
            elsewhere = await self._owners_elsewhere()
        except grpc.aio.AioRpcError as error:
            await self._channel.close(None)
            raise FleetError(f"router {self._address}: {error.code().name}: {error.details()}") from error
        if elsewhere:
            await self._channel.close(None)
            raise FleetError(f"router {self._address} places nothing, so it has no decisions: ask {elsewhere}")
        self._first = self._last
        self._tasks = [asyncio.create_task(self._sample_on()), asyncio.create_task(self._watch())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    async def wait_for_outcomes(self, decision_ids: Collection[str]) -> None:
        """Wait until these decisions have an outcome and the engines' load reports are newer, at most SETTLE_S; then sample."""
        began = time.monotonic()
        wanted = {name for name in decision_ids if name}
        with contextlib.suppress(grpc.aio.AioRpcError):
            while time.monotonic() - began < SETTLE_S:
                wanted = {name for name in wanted if self._open(name)}
                asked = time.monotonic()
                statuses = await self._list()
                # A load report from before the wait may miss the effect of the last answers.
                late = any(
                    status.load.sample_age_ms / 1e3 > asked - began for status in statuses if status.load.healthy
                )
                if not wanted and not late:
                    break
                await asyncio.sleep(SETTLE_POLL_S)
            for decision in await self._newest():
                self.decisions[decision.decision_id] = decision
            await self._sample()

    def caches(self) -> dict[str, Any]:
        """Return each instance's cache at the end and its hits from the first sample to the last; JSON-ready, in tokens."""
        first = {status.instance.instance_id: status for status in self._first}
        return {
            status.instance.instance_id: _cache(first.get(status.instance.instance_id), status) for status in self._last
        }

    async def _owners_elsewhere(self) -> str:
        """Return the routers that own pools if this one owns none; empty if this one owns a pool, or no pool has an owner."""
        answer = await self._fleet.ListReplicas(
            fleet_pb2.ListReplicasRequest(), timeout=CALL_S, metadata=self._metadata()
        )
        owners = {pool.owner.router_id: pool.owner.address for pool in answer.pools if pool.HasField("owner")}
        if answer.this_replica.router_id in owners:
            return ""
        return " or ".join(f"{router_id} at {address}" for router_id, address in sorted(owners.items()))

    def _open(self, decision_id: str) -> bool:
        decision = self.decisions.get(decision_id)
        return decision is None or decision.outcome == fleet_pb2.DECISION_OUTCOME_OPEN

    async def _sample_on(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._sample()
            except grpc.aio.AioRpcError:
                self.missed += 1

    async def _sample(self) -> None:
        self._last = await self._list()
        now = self._clock()
        self.samples += (
            sample(now, status.instance.instance_id, status, status.keys, status.sessions, status.load)
            for status in self._last
        )

    async def _list(self) -> list[fleet_pb2.InstanceStatus]:
        answer = await whole_async(
            lambda request: self._fleet.ListInstances(request, timeout=CALL_S, metadata=self._metadata()),
            fleet_pb2.ListInstancesRequest(),
            "instances",
        )
        return list(answer.instances)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                stream = self._fleet.WatchDecisions(fleet_pb2.WatchDecisionsRequest(), metadata=self._metadata())
                async for logged in stream:
                    self.decisions[logged.decision.decision_id] = logged.decision
            await asyncio.sleep(RETRY_S)

    async def _newest(self) -> list[fleet_pb2.Decision]:
        """Return the newest decisions, which include those that the stream missed while it was down."""
        answer = await whole_async(
            lambda request: self._fleet.ListDecisions(request, timeout=CALL_S, metadata=self._metadata()),
            fleet_pb2.ListDecisionsRequest(page_size=PAGE),
            "decisions",
            most=PAGE,
        )
        return list(answer.decisions)


def _cache(first: fleet_pb2.InstanceStatus | None, last: fleet_pb2.InstanceStatus) -> dict[str, Any]:
    restarted = first is None or first.instance.incarnation != last.instance.incarnation
    before = fleet_pb2.InstanceStatus().load if restarted or first is None else first.load
    load = last.load
    queries = load.prefix_cache_queries - before.prefix_cache_queries
    local = load.prefix_cache_hits - before.prefix_cache_hits
    external = load.external_prefix_cache_hits - before.external_prefix_cache_hits
    return {
        "incarnation": last.instance.incarnation,
        "restarted": restarted,
        "block_size": last.instance.block_size,
        "kv_capacity_tokens": last.instance.kv_capacity_tokens,
        "kv_usage": round(load.kv_usage, 6),
        "prefix_source": fleet_pb2.PrefixSource.Name(last.prefix_source).removeprefix("PREFIX_SOURCE_"),
        "keys": last.keys,
        "approximate_keys": last.approximate_keys,
        "provisional_keys": last.provisional_keys,
        "sessions": last.sessions,
        "queried_tokens": queries,
        "local_hit_tokens": local,
        "external_hit_tokens": external,
        "hit_ratio": {
            "local": round(local / queries, 6) if queries else None,
            "external": round(external / queries, 6) if queries else None,
            "both": round((local + external) / queries, 6) if queries else None,
        },
        "preemptions": load.preemptions - before.preemptions,
    }
