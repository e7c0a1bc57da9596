"""What can happen to the router (events), and what it wants done about it (effects). Immutable values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.router.domain import Decision, InstanceInfo, Load, Phase, PlacementRequest, Step
from services.router.reservations import Reservation
from services.router.sync import KeyMessage

# ---- events: agents ----


@dataclass(frozen=True, slots=True)
class AgentHello:
    """An agent opened `stream_id` for an instance and has deltas oldest..latest."""

    stream_id: int
    info: InstanceInfo
    key_scheme: str
    oldest_seq: int
    latest_seq: int


@dataclass(frozen=True, slots=True)
class KeysReported:
    """A message about an instance's keys."""

    stream_id: int
    instance_id: str
    message: KeyMessage


@dataclass(frozen=True, slots=True)
class LoadReported:
    """A load sample."""

    stream_id: int
    instance_id: str
    load: Load


@dataclass(frozen=True, slots=True)
class AgentGoodbye:
    """The incarnation is over."""

    stream_id: int
    instance_id: str


@dataclass(frozen=True, slots=True)
class AgentLost:
    """The stream ended without a goodbye."""

    stream_id: int
    instance_id: str


# ---- events: gateways ----


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A running request that a gateway announces."""

    request: PlacementRequest
    instance_id: str
    phase: Phase
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class GatewayHello:
    """A gateway (re)connected, or learned what this replica owns; its reservations that it does not list are over.

    `waiting` are request ids that it waits for an answer to.
    """

    gateway_id: str
    open_streams: tuple[OpenStream, ...] = ()
    waiting: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway's stream ended; its reservations live on for the lease, its held requests are forgotten: it asks again."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class PlaceRequested:
    """A request wants its first step, at once or, when it is held, in time. `gateway_id` is empty for the unary form, whose
    reservation has a lease."""

    request: PlacementRequest
    gateway_id: str = ""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A PREFILL step ended, or a SERVE step did not get the KV it was to answer from. `error` says how it failed."""

    request_id: str
    step_index: int
    ok: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """An answer began."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended, however it did. Token counts are the engine's own, None where it did not say."""

    request_id: str
    outcome: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""
    http_status: int = 0
    timings_ms: Mapping[str, float] | None = None


# ---- events: operators and time ----


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator stops (or resumes) placements on an instance."""

    instance_id: str
    resume: bool = False


@dataclass(frozen=True, slots=True)
class StoreState:
    """The shared store went away (degraded) or came back."""

    degraded: bool


@dataclass(frozen=True, slots=True)
class PoolTaken:
    """This replica owns `pool` from now on. What the shared store knew of it replaces what was known."""

    pool: str
    reservations: tuple[Reservation, ...]
    affinity: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PoolLost:
    """Another replica owns `pool` now, or is about to: nothing known of its requests counts any more."""

    pool: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    AgentHello
    | KeysReported
    | LoadReported
    | AgentGoodbye
    | AgentLost
    | GatewayHello
    | GatewayLost
    | PlaceRequested
    | StepDone
    | FirstToken
    | Finished
    | Drain
    | StoreState
    | PoolTaken
    | PoolLost
    | Tick
)

# ---- effects ----


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer an agent's hello."""

    stream_id: int
    snapshot: bool
    resume_from_seq: int


@dataclass(frozen=True, slots=True)
class Resync:
    """Ask an agent for a new snapshot."""

    stream_id: int
    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Distrusted:
    """An instance's answers fall short of what is predicted for it, persistently; `reason` tells how far."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RefuseReport:
    """End an agent's stream: FAILED_PRECONDITION when the instance cannot be placed, ABORTED when a newer stream took over."""

    stream_id: int
    reason: str
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """A request's next step, for the gateway that asked (empty: for the unary form). It may come long after the question."""

    request_id: str
    decision: Decision
    step_index: int
    step: Step
    last: bool
    gateway_id: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request cannot be placed; `code` is the gRPC status name. Nothing is reserved.

    `not_now`: only because another replica owns the `pool`, or this one has just started.
    """

    request_id: str
    code: str
    message: str
    retry_after_s: float | None = None
    gateway_id: str = ""
    not_now: bool = False
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Decided:
    """A new decision, for the log."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that became of a decision's plan before its request ended."""

    decision_id: str
    note: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A decision's request ended."""

    decision_id: str
    finished: Finished


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """Models, instances or their readiness changed."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """For the shared store: a reservation opened or moved on."""

    reservation: Reservation


@dataclass(frozen=True, slots=True)
class Released:
    """For the shared store: a reservation ended."""

    request_id: str
    pool: str


@dataclass(frozen=True, slots=True)
class OwnerSet:
    """For the shared store: a session's owner."""

    session: str
    instance_id: str
    pool: str


Effect = (
    Welcome
    | Resync
    | Distrusted
    | RefuseReport
    | Placed
    | Refused
    | Decided
    | Noted
    | Closed
    | FleetChanged
    | Reserved
    | Released
    | OwnerSet
)
