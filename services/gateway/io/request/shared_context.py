"""The services that the runs of all requests share: router, upstream, pools, metrics, timeouts."""

from __future__ import annotations

from dataclasses import dataclass

from pointsman.gateway.core.request.attempt_report import AttemptBreakdown
from pointsman.gateway.core.request.request_events import RequestTimeouts
from pointsman.gateway.io.engines.engine_client import Upstream
from pointsman.gateway.io.engines.remote_prefill import EngineIdCache, KvReleases
from pointsman.gateway.io.routing.model_pools import ModelPools
from pointsman.gateway.io.routing.router_client import RouterClient
from pointsman.gateway.io.telemetry.line_log import LineLog
from pointsman.gateway.io.telemetry.metrics import GatewayMetrics


@dataclass
class SharedContext:
    """What every request works with."""

    router: RouterClient
    upstream: Upstream
    bootstraps: EngineIdCache
    releases: KvReleases
    pools: ModelPools
    telemetry: GatewayMetrics
    timeouts: RequestTimeouts
    whole_timeouts: RequestTimeouts  # of answers that are not streamed
    breakdown: LineLog[AttemptBreakdown]
    expose_placement: bool
    round_robin: int = 0  # round-robin among equals for placements of our own
