"""What is to be simulated. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pointsman.common.core.block_keys import KEY_TOKENS
from pointsman.gateway.core.pool_owners import DEFAULT_OWNER_TIMEOUT_S
from pointsman.gateway.core.request.request_events import RequestTimeouts
from pointsman.lab.engine.cost_profile import Profile
from pointsman.lab.engine.interface import EngineConfig
from pointsman.router.core.policy.base import Policy
from pointsman.router.core.router_state import StateSettings

TIMINGS = ("trace", "think")


class SimulationError(ValueError):
    """A simulation that cannot be run as asked; the message names the field and what it may be."""


@dataclass(frozen=True)
class SimulationConfig:
    """What to simulate. `timing` is "trace" or "think", as in replays; times of the trace are multiplied by `time_scale`. With
    `max_sessions` no more sessions are in flight: further ones wait, from their first turn on, until one has ended (0: no cap).

    The instances have these `names`; by default they are numbered. `policy` is a name, with `policy_settings`, or a policy
    itself. `retries` is how often a client that was refused for the moment asks again, each time after the seconds that it was
    told. With `layerwise` KV is pushed while it is computed. With `prompts_include_answers` what a turn generated begins what the
    session's next prompt has beyond it (`pointsman.lab.workload.block_names`).

    Times that pass on the way: a request is read in `frontend_s`, and its prompt tokenised at `tokenise_token_s` per token,
    always; the way to the router and the way back each take `placement_s` / 2 in the mean, and whatever is sent to an engine, a
    step or a slice, reaches its scheduler after `api_s` in the mean: these are exponential, and drawn for each request by itself,
    so that under one `seed` a request has the same luck whatever the policy. Agents' reports come `report_delay_s` late, if they
    come: a share of `report_loss` (0 to below 1) does not.

    Sessions are dealt to `pools` models in turn, as instances are; `routers` replicas share the pools, each of which one owns.
    At `owner_dies_at_s` the owner of the first pool dies, and all that it owned is taken over `takeover_s` later, when its lease
    has run out; `owner_back_after_s` after its death it is there again, knowing nothing but what agents then tell, and once it
    has settled the pools that prefer it are handed to it. At `hand_over_at_s` the first pool's owner hands it to another. A pool
    that is handed over has its new owner `hand_over_takes_s` later. None: never.

    A gateway that has waited `ownerless_timeout_s` for a pool's owner places by itself; how long it waits for what else is in
    `timeouts`.
    """

    instances: int = 8
    names: tuple[str, ...] = ()
    policy: str | Policy = "unified"
    policy_settings: Mapping[str, object] = field(default_factory=dict)
    timing: str = "trace"
    time_scale: float = 1.0
    max_sessions: int = 0
    seed: int = 0
    retries: int = 10
    layerwise: bool = False
    prompts_include_answers: bool = True
    frontend_s: float = 0.0
    tokenise_token_s: float = 0.0
    placement_s: float = 0.0
    api_s: float = 0.0
    report_delay_s: float = 0.0
    report_loss: float = 0.0
    pools: int = 1
    routers: int = 1
    owner_dies_at_s: float | None = None
    takeover_s: float = 1.5
    owner_back_after_s: float | None = None
    hand_over_at_s: float | None = None
    hand_over_takes_s: float = 0.25
    ownerless_timeout_s: float = DEFAULT_OWNER_TIMEOUT_S
    timeouts: RequestTimeouts = field(default_factory=RequestTimeouts)
    router: StateSettings = field(default_factory=StateSettings)
    engine: EngineConfig = field(default_factory=EngineConfig)
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self) -> None:
        if self.engine.block_size != KEY_TOKENS:
            raise SimulationError(f"block_size: only engines with block_size {KEY_TOKENS} are simulated")
        if self.names and len(set(self.names)) != self.instances:
            raise SimulationError(f"names: {len(set(self.names))} different ones for {self.instances} instances")
        if self.timing not in TIMINGS:
            raise SimulationError(f"timing: {self.timing!r} is not {' or '.join(TIMINGS)}")
        if not 0 <= self.report_loss < 1:
            raise SimulationError(f"report_loss: {self.report_loss} is not in 0 to below 1")
        for name in (
            "frontend_s",
            "tokenise_token_s",
            "placement_s",
            "api_s",
            "report_delay_s",
            "takeover_s",
            "hand_over_takes_s",
            "ownerless_timeout_s",
            "max_sessions",
        ):
            if getattr(self, name) < 0:
                raise SimulationError(f"{name}: {getattr(self, name)} is negative")
        if not 1 <= self.pools <= self.instances:
            raise SimulationError(f"pools: {self.pools} is not in 1 to the number of instances, {self.instances}")
        if self.routers < 1:
            raise SimulationError(f"routers: {self.routers} is not at least 1")
        if self.owner_back_after_s is not None and (self.owner_dies_at_s is None or self.owner_back_after_s < 0):
            raise SimulationError(f"owner_back_after_s: {self.owner_back_after_s} is negative, or no owner dies")
        for name in ("owner_dies_at_s", "hand_over_at_s"):
            if getattr(self, name) is not None and self.routers < 2:
                raise SimulationError(f"{name}: nobody could take over; routers must be at least 2")
