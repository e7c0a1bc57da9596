"""The services that all requests share: router, upstream, pools, metrics, timeouts."""

from __future__ import annotations

from dataclasses import dataclass, field

from pointsman_gateway.core.memory_budget import MemoryBudget
from pointsman_gateway.core.request.attempt_end_reports import AttemptBreakdown
from pointsman_gateway.core.request.request_events import RequestTimeouts
from pointsman_gateway.core.tenant_pace import TenantPace
from pointsman_gateway.io.engines.engine_client import Upstream
from pointsman_gateway.io.engines.remote_prefill import EngineIdCache, KvReleases
from pointsman_gateway.io.request.fair_turns import FairTurns
from pointsman_gateway.io.request.first_fetches import FirstFetches
from pointsman_gateway.io.routing.model_pools import ModelPools
from pointsman_gateway.io.routing.router_client import RouterClient
from pointsman_gateway.io.telemetry.line_log import LineLog
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics

# Maximum number of answers that a gateway process has continued at another instance per second, and at once.
CONTINUED_PER_S, CONTINUED_AT_ONCE = 10.0, 600


@dataclass
class SharedContext:
    """Services that all requests of a gateway process share."""

    router: RouterClient  # client of all routers
    upstream: Upstream  # client of all engines
    engine_ids: EngineIdCache  # engine ids from the bootstrap servers of KV sources
    releases: KvReleases  # frees KV of transfers that will not happen
    pools: ModelPools  # by model, with tokenizers and their checks
    telemetry: GatewayMetrics  # of this process
    timeouts: RequestTimeouts  # for streams
    whole_timeouts: RequestTimeouts  # for answers that are not streamed
    breakdown: LineLog[AttemptBreakdown]  # file of attempts; does nothing without a file
    expose_placement: bool  # setting: answers name decision and instance
    mark_session_ends: bool  # setting: engines are told the last request of a session
    kept_bodies: MemoryBudget  # bodies that are kept while their answers are streamed, to go on at another instance
    proxy_fallbacks: int = 0  # number of instances besides the chosen one that a proxy gets
    # Answers that go on at another instance: requests that end their engines must not go on doing so.
    continuations: TenantPace = field(default_factory=lambda: TenantPace(CONTINUED_PER_S, CONTINUED_AT_ONCE))
    first_fetches: FirstFetches = field(default_factory=FirstFetches)  # equal fetches wait for the first
    text_turns: FairTurns = field(default_factory=lambda: FairTurns(1))  # to tokenise a begun text
