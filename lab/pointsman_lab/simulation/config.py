"""The configuration of a simulation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_gateway.core.pool_owners import DEFAULT_OWNER_TIMEOUT_S
from pointsman_gateway.core.request.request_events import RequestTimeouts
from pointsman_lab.admission.registry import RULES
from pointsman_lab.engine.cost_profile import Profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_router.core.policy.base import Policy
from pointsman_router.core.priority import Priority
from pointsman_router.core.router_state import StateSettings

TIMINGS = ("trace", "think")


class SimulationError(ValueError):
    """A configuration that cannot be simulated; the message names the field and its allowed values."""


@dataclass(frozen=True)
class Tenant:
    """A tenant of the gateway: name, weight of its share, class of its requests, and its number of sessions relative to other
    tenants' `sessions`."""

    name: str = ""
    weight: float = 1.0
    priority: Priority = Priority.STANDARD
    sessions: float = 1.0


@dataclass(frozen=True)
class SimulationConfig:
    """The configuration of a simulation. None as a time: never.

    Delays: `placement_s` and `api_s` are means; these delays are exponentially distributed, the others
    constant. Each request has its own draws, so under one `seed` a request has the same delays with every policy.
    """

    instances: int = 8  # their number at the beginning
    names: tuple[str, ...] = ()  # of the instances; empty: they are numbered
    policy: str | Policy = "unified"  # a name, with `policy_settings`, or a policy object
    # Values over the policy's defaults, by setting; not used with a policy object.
    policy_settings: Mapping[str, object] = field(default_factory=dict)
    timing: str = "trace"  # "trace" or "think", as in replays
    time_scale: float = 1.0  # times of the trace are multiplied by it
    # Maximum number of sessions in flight; 0: unlimited. A session over the limit waits before its first turn until another
    # session has ended.
    max_sessions: int = 0
    seed: int = 0
    # Maximum number of retries of a client that is refused with a retry time; it waits that time before each.
    retries: int = 10
    # A client disconnects when it has had no token for so long since it first sent the request.
    leaves_after_s: float | None = None
    gives_up: bool = False  # a session ends with a request that failed; otherwise its next turn follows
    unnamed_share: float = 0.0  # share of the sessions, 0 to 1, that send no session id
    tenants: tuple[Tenant, ...] = (Tenant(),)  # each session is of one of them, at random by their shares
    # The admission rule of the lab in front of the gateway, one of `pointsman_lab.admission.registry.RULES`; empty: none.
    lab_admission: str = ""
    layerwise: bool = False  # KV is pushed while it is computed
    kv_transfers: bool = True  # every engine has a connector, by which it sends KV to others and receives it
    # An engine's transfers to others share its link: each waits for those before it.
    one_transfer_at_a_time: bool = False
    # The tokens that a turn generated follow its prompt in the session's next prompt (`pointsman_lab.workload.block_names`).
    prompts_include_answers: bool = True
    frontend_s: float = 0.0  # reading a request takes so long
    tokenise_token_s: float = 0.0  # tokenising takes so long per prompt token
    placement_s: float = 0.0  # the way to the router and the way back each take half of it
    api_s: float = 0.0  # a step or slice reaches an engine's scheduler after that
    report_delay_s: float = 0.0  # agents' reports arrive so much later
    report_loss: float = 0.0  # share of the reports, 0 to below 1, that is lost
    exact_prefixes: bool = True  # if False, no engine reports KV events
    producers: int = 0  # the last so many instances only prefill for others
    pools: int = 1  # number of models, to which sessions are assigned in turn, and so are instances
    routers: int = 1  # number of replicas that share the pools; each pool has one owner
    owner_dies_at_s: float | None = None  # when the owner of the first pool dies
    takeover_s: float = 1.5  # its pools are taken over so much later, when its lease has expired
    # After so long since its death it returns without state other than what agents then report. When it has settled, the pools
    # that prefer it are handed over to it.
    owner_back_after_s: float | None = None
    hand_over_at_s: float | None = None  # when the first pool's owner hands the pool to another router
    hand_over_takes_s: float = 0.25  # a pool that is handed over has its new owner so much later
    # A gateway that has waited so long for a pool's owner places the request itself.
    ownerless_timeout_s: float = DEFAULT_OWNER_TIMEOUT_S
    # The host tiers of a pool's instances copy their blocks to one storage, from which all of them can load.
    shared_storage: bool = False
    # If False, agents report only the keys of engines' own caches, so that routers do not know of the tiers below.
    tiers_reported: bool = True
    timeouts: RequestTimeouts = field(default_factory=RequestTimeouts)  # a gateway's other timeouts
    router: StateSettings = field(default_factory=StateSettings)  # of every router
    engine: EngineConfig = field(default_factory=EngineConfig)  # of every instance
    profile: Profile = field(default_factory=Profile)  # of every instance

    def __post_init__(self) -> None:
        if self.engine.block_size != KEY_TOKENS:
            raise SimulationError(f"block_size: only engines with block_size {KEY_TOKENS} are simulated")
        if self.shared_storage and not self.engine.host_blocks:
            raise SimulationError(
                "shared_storage: blocks reach storage through a host tier, and engine.host_blocks is 0"
            )
        if self.names and len(set(self.names)) != self.instances:
            raise SimulationError(f"names: {len(set(self.names))} different names for {self.instances} instances")
        if self.timing not in TIMINGS:
            raise SimulationError(f"timing: {self.timing!r} is not {' or '.join(TIMINGS)}")
        if not 0 <= self.report_loss < 1:
            raise SimulationError(f"report_loss: {self.report_loss} is not in 0 to below 1")
        if self.lab_admission and self.lab_admission not in RULES:
            raise SimulationError(
                f"lab_admission: there is no rule {self.lab_admission!r}; the rules are {', '.join(RULES)}"
            )
        if not 0 <= self.unnamed_share <= 1:
            raise SimulationError(f"unnamed_share: {self.unnamed_share} is not in 0 to 1")
        if self.leaves_after_s is not None and self.leaves_after_s <= 0:
            raise SimulationError(f"leaves_after_s: {self.leaves_after_s} is not above 0")
        if not self.tenants or min(tenant.sessions for tenant in self.tenants) <= 0:
            raise SimulationError("tenants: there must be at least one, each with sessions above 0")
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
        if not 0 <= self.producers < self.instances:
            raise SimulationError(f"producers: {self.producers} is not in 0 to below {self.instances}, the instances")
        if self.producers and not self.kv_transfers:
            raise SimulationError(f"producers: {self.producers} instances compute KV for others, without kv_transfers")
        if self.routers < 1:
            raise SimulationError(f"routers: {self.routers} is not at least 1")
        if self.owner_back_after_s is not None and (self.owner_dies_at_s is None or self.owner_back_after_s < 0):
            raise SimulationError(f"owner_back_after_s: {self.owner_back_after_s} is negative, or no owner dies")
        for name in ("owner_dies_at_s", "hand_over_at_s"):
            if getattr(self, name) is not None and self.routers < 2:
                raise SimulationError(f"{name}: no router could take over; routers must be at least 2")
