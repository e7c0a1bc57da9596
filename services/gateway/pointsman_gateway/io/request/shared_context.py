"""The services that all requests share: router, upstream, pools, metrics, timeouts."""

from __future__ import annotations

from dataclasses import dataclass, field

from pointsman_gateway.core.request.attempt_end_reports import AttemptBreakdown
from pointsman_gateway.core.request.continuation import Continuations
from pointsman_gateway.core.request.request_events import RequestTimeouts
from pointsman_gateway.io.engines.engine_client import Upstream
from pointsman_gateway.io.engines.remote_prefill import EngineIdCache, KvReleases
from pointsman_gateway.io.request.fair_turns import FairTurns
from pointsman_gateway.io.routing.model_pools import ModelPools
from pointsman_gateway.io.routing.router_client import RouterClient
from pointsman_gateway.io.telemetry.line_log import LineLog
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics


@dataclass
class SharedContext:
    """Services that all requests of a gateway process share."""

    router: RouterClient
    upstream: Upstream
    bootstraps: EngineIdCache
    releases: KvReleases
    pools: ModelPools
    telemetry: GatewayMetrics
    timeouts: RequestTimeouts
    whole_timeouts: RequestTimeouts  # for answers that are not streamed
    breakdown: LineLog[AttemptBreakdown]
    expose_placement: bool
    mark_session_ends: bool
    continuations: Continuations
    proxy_fallbacks: int = 0  # number of instances besides the chosen one that a proxy gets
    text_turns: FairTurns = field(default_factory=lambda: FairTurns(1))  # to tokenise a begun text
