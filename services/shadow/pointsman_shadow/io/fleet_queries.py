"""Queries to a Pointsman router that places nothing: its engines, and dry runs of placements.

Only the router's FleetService is called. Its Explain reserves nothing. The role `observer` permits these calls and no others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import structlog

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2
from pointsman_common.io.auth import showing
from pointsman_common.io.channel import open_channel
from pointsman_common.io.settings import Tokens
from pointsman_common.io.whole_lists import whole_async
from pointsman_shadow.io.placement_comparison import ModelEngines

log = structlog.get_logger()

# Timeout of a query, s.
ANSWER_S = 2.0
# Interval between two queries for the router's instances, s.
ASK_EVERY_S = 2.0


@dataclass(frozen=True)
class LivePlacement:
    """Where a request would have been placed by the engines' real state. `cached` is the number of its cached tokens by
    instance."""

    instance: str
    cached: Mapping[str, int]


@dataclass
class LivePlacementTotals:
    """Totals of live placements."""

    asked: int = 0  # answered ones whose request was compared; a failed request is not
    unanswered: int = 0  # no answer, or an answer without a step; not in `asked`
    cached_tokens: int = 0  # at the instances that would have been chosen, of all in `asked`
    placed: int = 0  # requests whose instance is known
    same: int = 0  # of the placed ones only
    actual_cached_tokens: int = 0  # of the placed ones only
    would_be_cached_tokens: int = 0  # of the placed ones only

    def add(self, now: LivePlacement, instance: str) -> None:
        """Count a live placement. `instance` is the one that the other router chose, empty if unknown. Mutates."""
        self.asked += 1
        modelled_cached_tokens = now.cached[now.instance]
        self.cached_tokens += modelled_cached_tokens
        if instance in now.cached:
            self.placed += 1
            self.same += instance == now.instance
            self.actual_cached_tokens += now.cached[instance]
            self.would_be_cached_tokens += modelled_cached_tokens


@dataclass
class _Counter:
    first: tuple[int, int]
    last: tuple[int, int]


@dataclass(frozen=True)
class ServedModel:
    """A model of the fleet: its served names, adapters, tokenizer source (`root`) and engines."""

    served_names: tuple[str, ...]
    lora_names: tuple[str, ...]
    root: str
    engines: ModelEngines


class FleetQueries:
    """Client of the FleetService of one router at a time: of the next one when it does not answer."""

    def __init__(self, routers: Sequence[str], every_s: float, policy: str, policy_settings: Mapping[str, Any]) -> None:
        """`routers`: gRPC's targets. Raises ValueError or OSError for TLS settings or a token that cannot be used."""
        self._routers = deque(routers)
        self._every_s = every_s
        self._policy = fleet_pb2.Policy(name=policy)
        self._policy.settings.update(policy_settings)
        self._channels = {router: open_channel(router) for router in routers}
        self._metadata = showing(Tokens(), "observer")
        self._counters: dict[tuple[str, str], _Counter] = {}
        self.totals = LivePlacementTotals()

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close(None)

    @property
    def _fleet(self) -> fleet_pb2_grpc.FleetServiceAsyncStub:
        return fleet_pb2_grpc.FleetServiceStub(self._channels[self._routers[0]])

    async def watch(self, on_models: Callable[[dict[str, ServedModel]], Awaitable[None]]) -> None:
        """Query the instances periodically until cancelled, and pass their models to `on_models`."""
        away = False
        while True:
            try:
                answer = await whole_async(
                    lambda request: self._fleet.ListInstances(request, timeout=ANSWER_S, metadata=self._metadata()),
                    fleet_pb2.ListInstancesRequest(),
                    "instances",
                )
            except grpc.aio.AioRpcError as error:
                if not away:
                    log.warning("the router does not answer", router=self._routers[0], error=error.code().name)
                away = True
                self._routers.rotate(-1)
            else:
                away = False
                self._count(answer)
                await on_models(models_of(answer))
            await asyncio.sleep(self._every_s)

    async def ask(self, request: placement_pb2.PlacementRequest) -> LivePlacement | None:
        """Return where the router would place a request now; None if it does not answer or would not place the request."""
        try:
            answer = await self._fleet.Explain(
                fleet_pb2.ExplainRequest(request=request, policy=self._policy),
                timeout=ANSWER_S,
                metadata=self._metadata(),
            )
        except grpc.aio.AioRpcError as error:
            log.debug("a dry run failed", code=error.code().name)
            self.totals.unanswered += 1
            return None
        steps = answer.decision.steps
        if not steps:
            self.totals.unanswered += 1
            return None
        cached = {candidate.instance_id: candidate.cached_tokens for candidate in answer.decision.candidates}
        return LivePlacement(steps[-1].instance.instance_id, cached)

    def summary(self) -> dict[str, Any]:
        """Return the totals as JSON. `engines` has the engines' own counters since their first report."""
        pairs = [
            (counters.last[0] - counters.first[0], counters.last[1] - counters.first[1])
            for counters in self._counters.values()
        ]
        return vars(self.totals) | {
            "engines": {
                "queried_tokens": sum(queries for queries, _ in pairs),
                "hit_tokens": sum(hits for _, hits in pairs),
            }
        }

    def _count(self, answer: fleet_pb2.ListInstancesResponse) -> None:
        for status in answer.instances:
            counters = {"prefix_cache_queries", "prefix_cache_hits"}
            if status.HasField("load") and not counters.intersection(status.load.unknown):
                key = status.instance.instance_id, status.instance.incarnation
                now = status.load.prefix_cache_queries, status.load.prefix_cache_hits
                self._counters.setdefault(key, _Counter(now, now)).last = now


def models_of(answer: fleet_pb2.ListInstancesResponse) -> dict[str, ServedModel]:
    """Return the models that a router's instances serve, by name. A model has its smallest cache and its shortest context."""
    by_model: dict[str, list[Any]] = {}
    for status in answer.instances:
        by_model.setdefault(status.instance.model, []).append(status.instance)
    return {
        model: ServedModel(
            tuple(dict.fromkeys(name for instance in instances for name in instance.served_names)),
            tuple(dict.fromkeys(name for instance in instances for name in instance.lora_names)),
            instances[0].model_root,
            ModelEngines(
                tuple(sorted(instance.instance_id for instance in instances)),
                min((instance.kv_capacity_tokens for instance in instances if instance.kv_capacity_tokens), default=0),
                min((instance.max_model_len for instance in instances if instance.max_model_len), default=0),
            ),
        )
        for model, instances in by_model.items()
    }
