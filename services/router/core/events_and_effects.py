"""What can happen to the router (events), and what it wants done about it (effects). Immutable values. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pointsman.router.core.instances.instance_orders import InstanceOrder
from pointsman.router.core.instances.report_sync import KeyMessage
from pointsman.router.core.load.reservations import Reservation
from pointsman.router.core.policy.base import Policy
from pointsman.router.core.prefill_curve import MeanWork
from pointsman.router.core.types import Decision, InstanceInfo, Load, Phase, PlacementRequest, Step

# The outcome of a request that has ended nobody knows how.
UNKNOWN = "UNKNOWN"

# ---- events: agents ----


class AgentHello(msgspec.Struct, frozen=True, gc=False):
    """An agent opened `stream_id` for an instance and has deltas oldest..latest. It speaks every `report_interval_s` at least (0:
    not told)."""

    stream_id: int
    info: InstanceInfo
    key_scheme: str
    oldest_seq: int
    latest_seq: int
    report_interval_s: float = 0.0


class KeysReported(msgspec.Struct, frozen=True, gc=False):
    """A message about an instance's keys."""

    stream_id: int
    instance_id: str
    message: KeyMessage


class LoadReported(msgspec.Struct, frozen=True, gc=False):
    """A load sample."""

    stream_id: int
    instance_id: str
    load: Load


class AgentGoodbye(msgspec.Struct, frozen=True, gc=False):
    """The incarnation is over."""

    stream_id: int
    instance_id: str


class AgentLost(msgspec.Struct, frozen=True, gc=False):
    """The stream ended without a goodbye."""

    stream_id: int
    instance_id: str


# ---- events: gateways ----


class OpenStream(msgspec.Struct, frozen=True, gc=False):
    """A running request that a gateway announces."""

    request: PlacementRequest
    instance_id: str
    phase: Phase
    cached_tokens: int


class GatewayHello(msgspec.Struct, frozen=True, gc=False):
    """A gateway (re)connected, or learned what this replica owns; its reservations that it does not list are over.

    `waiting` are request ids that it waits for an answer to, `known` the ids of the instances that it was last told of.
    """

    gateway_id: str
    open_streams: tuple[OpenStream, ...] = ()
    waiting: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()


class GatewayLost(msgspec.Struct, frozen=True, gc=False):
    """A gateway's stream ended; its reservations live on for the lease, its held requests are forgotten: it asks again."""

    gateway_id: str


class PlaceRequested(msgspec.Struct, frozen=True, gc=False):
    """A request wants its first step, at once or, when it is held, in time. `gateway_id` is empty for the unary form, whose
    reservation has a lease."""

    request: PlacementRequest
    gateway_id: str = ""


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """A PREFILL step ended, or a SERVE step did not get the KV it was to answer from. `error` says how it failed;
    `instance_failed`: its instance is to blame. `deadline_s`: how much longer the gateway waits for the next step; None: nobody
    knows."""

    request_id: str
    step_index: int
    ok: bool
    error: str = ""
    instance_failed: bool = False
    deadline_s: float | None = None


class StreamOpened(msgspec.Struct, frozen=True, gc=False):
    """A gateway waited in vain for a request's next step, and went on alone."""

    gateway_id: str
    stream: OpenStream


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """An answer began. `refused_by`: the instances that answered 5xx before."""

    request_id: str
    refused_by: tuple[str, ...] = ()


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A request ended, however it did. `outcome`: OK, CANCELLED, REJECTED, FAILED, or UNKNOWN, which says nothing of its
    instance. Token counts are the engine's own, None where it did not say. `refused`: its instance answered 5xx. `refused_by`:
    as in FirstToken, of a request that ended without one. `finish_reason`: STOP, LENGTH, ..., "" where nobody said.
    `cached_by_tier`: tier (agent.v1.Tier) -> tokens, as far as that is known."""

    request_id: str
    outcome: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""
    http_status: int = 0
    timings_ms: Mapping[str, float] | None = None
    refused: bool = False
    refused_by: tuple[str, ...] = ()
    finish_reason: str = ""
    cached_by_tier: Mapping[int, int] | None = None


class GatewayTold(msgspec.Struct, frozen=True, gc=False):
    """What became of a request, as `gateway_id` tells (empty: whoever calls the unary form). It may tell of its own, of those of
    the unary form, and of those of a gateway without a stream, whose reservations have a lease. The same holds for what it asks
    (PlaceRequested), and for what it says to run (StreamOpened, GatewayHello)."""

    gateway_id: str
    told: StepDone | FirstToken | Finished


# ---- events: operators and time ----


class DrainsChanged(msgspec.Struct, frozen=True, gc=False):
    """From now on these instances, each in the incarnation given, get nothing new by operators' configuration, and all others
    may."""

    incarnations: Mapping[str, str]


class OrdersChanged(msgspec.Struct, frozen=True, gc=False):
    """From now on these are operators' orders by instance id, of instances known or not, whatever their incarnation."""

    orders: Mapping[str, InstanceOrder]


class PolicySet(msgspec.Struct, frozen=True, gc=False):
    """From now on this policy decides, on held requests, too. Decisions that were made stay."""

    policy: Policy


class StoreState(msgspec.Struct, frozen=True, gc=False):
    """The shared store went away (degraded) or came back."""

    degraded: bool


class PoolTaken(msgspec.Struct, frozen=True, gc=False):
    """This replica owns `pool` from now on. The open reservations and the mean work that the shared store knew replace what was
    known; its sessions follow."""

    pool: str
    reservations: tuple[Reservation, ...] = ()
    mean_work: MeanWork | None = None


class SessionsRead(msgspec.Struct, frozen=True, gc=False):
    """Some owners of sessions that the shared store knows of a pool that this replica has taken. What is known since counts
    more."""

    pool: str
    sessions: Mapping[str, str]


class PoolLost(msgspec.Struct, frozen=True, gc=False):
    """Another replica owns `pool` now, or is about to: nothing known of its requests counts any more."""

    pool: str


class GoOn(msgspec.Struct, frozen=True, gc=False):
    """There is time for the next part of what is unfinished (RouterState.unfinished)."""


class RetryDue(msgspec.Struct, frozen=True, gc=False):
    """The moment has come that RouterState.retry_at told: what was gathered is tried."""


class Tick(msgspec.Struct, frozen=True, gc=False):
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
    | StreamOpened
    | FirstToken
    | Finished
    | GatewayTold
    | DrainsChanged
    | OrdersChanged
    | PolicySet
    | StoreState
    | PoolTaken
    | SessionsRead
    | PoolLost
    | GoOn
    | RetryDue
    | Tick
)

# ---- effects ----


class Welcome(msgspec.Struct, frozen=True, gc=False):
    """Answer an agent's hello."""

    stream_id: int
    snapshot: bool
    resume_from_seq: int


class Resync(msgspec.Struct, frozen=True, gc=False):
    """Ask an agent for a new snapshot."""

    stream_id: int
    instance_id: str
    reason: str


class PredictionAuditFailed(msgspec.Struct, frozen=True, gc=False):
    """An instance's answers fall short of what is predicted for it, persistently; `reason` tells how far."""

    instance_id: str
    reason: str


class RefuseReport(msgspec.Struct, frozen=True, gc=False):
    """End an agent's stream: FAILED_PRECONDITION when the instance cannot be placed, ABORTED when a newer stream took over."""

    stream_id: int
    reason: str
    replaced: bool = False


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A request's next step, for the gateway that asked (empty: for the unary form). It may come long after the question."""

    request_id: str
    decision: Decision
    step_index: int
    step: Step
    last: bool
    gateway_id: str = ""


class Refused(msgspec.Struct, frozen=True, gc=False):
    """A request cannot be placed; `code` is the gRPC status name. Nothing is reserved.

    `not_serving`: only because another replica owns the `pool`, or this one has just started. `asked_model`: not
    empty, only who asks for that model under this id is refused (INVALID_ARGUMENT): the request that has the id is another one.
    """

    request_id: str
    code: str
    message: str
    retry_after_s: float | None = None
    gateway_id: str = ""
    not_serving: bool = False
    pool: str = ""
    asked_model: str = ""


class DecisionMade(msgspec.Struct, frozen=True, gc=False):
    """A new decision, for the log."""

    decision: Decision


class DecisionNoted(msgspec.Struct, frozen=True, gc=False):
    """Something that became of a decision's plan before its request ended."""

    decision_id: str
    note: str


class DecisionClosed(msgspec.Struct, frozen=True, gc=False):
    """A decision's request ended."""

    decision_id: str
    finished: Finished


class ReportIgnored(msgspec.Struct, frozen=True, gc=False):
    """A gateway told something of a request that another one has open, or waits for."""

    request_id: str
    gateway_id: str


class FleetChanged(msgspec.Struct, frozen=True, gc=False):
    """Models, instances or their readiness changed."""


class PoolForgotten(msgspec.Struct, frozen=True, gc=False):
    """A pool has had no instance for long, and nothing of it is open."""

    pool: str


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """For the shared store: a reservation opened or moved on."""

    reservation: Reservation


class Released(msgspec.Struct, frozen=True, gc=False):
    """For the shared store: a reservation ended."""

    request_id: str
    pool: str


class SessionOwnerSet(msgspec.Struct, frozen=True, gc=False):
    """For the shared store: a session's owner."""

    session: str
    instance_id: str
    pool: str


class MeanWorkSet(msgspec.Struct, frozen=True, gc=False):
    """For the shared store: the mean work of a pool's requests has changed."""

    mean_work: MeanWork
    pool: str


Effect = (
    Welcome
    | Resync
    | PredictionAuditFailed
    | RefuseReport
    | Placed
    | Refused
    | DecisionMade
    | DecisionNoted
    | DecisionClosed
    | ReportIgnored
    | FleetChanged
    | PoolForgotten
    | Reserved
    | Released
    | SessionOwnerSet
    | MeanWorkSet
)
