"""The events that RouterState handles and the effects that it returns. Immutable values. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pointsman_common.core.key_report_types import KeyMessage
from pointsman_common.core.session_names import session_name
from pointsman_router.core.admission_rule import AdmissionRecord
from pointsman_router.core.idle_sessions import IdleSessions
from pointsman_router.core.instances.instance_orders import InstanceOrder
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import (
    Decision,
    InstanceInfo,
    Load,
    Phase,
    PlacementRequest,
    PoolFacts,
    Step,
)
from pointsman_router.core.policy.base import Policy
from pointsman_router.core.prefill_curve import MeanWork

# The outcome of a request whose end is known, but not how it ended.
UNKNOWN = "UNKNOWN"

# ---- events: agents ----


class AgentHello(msgspec.Struct, frozen=True, gc=False):
    """An agent opened a stream for an instance."""

    stream_id: int  # number that this router gave the stream
    info: InstanceInfo  # replaces the earlier description of the same incarnation
    key_scheme: str  # the scheme of its block keys
    oldest_seq: int  # of the deltas that it keeps
    latest_seq: int  # of the deltas that it keeps
    report_interval_s: float = 0.0  # maximum interval between two of its messages, s; 0: unknown
    accepts_pace: bool = False  # whether it understands Pace
    agent_id: str = ""  # name of its process; empty: unknown


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
    """The agent reports that the incarnation has ended."""

    stream_id: int
    instance_id: str


class AgentLost(msgspec.Struct, frozen=True, gc=False):
    """The stream ended without a goodbye."""

    stream_id: int
    instance_id: str


# ---- events: gateways ----


class OpenStream(msgspec.Struct, frozen=True, gc=False):
    """A running request that a gateway reports."""

    request: PlacementRequest
    instance_id: str
    phase: Phase
    cached_tokens: int


class GatewayHello(msgspec.Struct, frozen=True, gc=False):
    """A gateway (re)connected, or learned that this replica owns other pools. Its reservations that it does not list have ended.

    `waiting`: ids of the requests for which it waits for an answer. `known`: ids of the instances that it was last sent.
    """

    gateway_id: str
    open_streams: tuple[OpenStream, ...] = ()
    waiting: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()


class GatewayLost(msgspec.Struct, frozen=True, gc=False):
    """A gateway's stream ended. Its reservations are kept for the lease. Its held requests are dropped, since it asks again."""

    gateway_id: str


class PlaceRequested(msgspec.Struct, frozen=True, gc=False):
    """A gateway asks for a request's first step. The answer comes at once, or later if the request is held. `gateway_id` is empty
    for the unary form, whose reservation has a lease."""

    request: PlacementRequest
    gateway_id: str = ""


class StepDone(msgspec.Struct, frozen=True, gc=False):
    """A PREFILL step ended, or a SERVE step did not get the KV that it needs."""

    request_id: str  # as in PlacementRequest
    step_index: int  # as in Placed
    ok: bool  # if not, one SERVE without another instance's KV is to replace the rest of the plan
    error: str = ""  # how the step failed
    instance_failed: bool = False  # whether the step's instance caused the failure
    deadline_s: float | None = None  # how much longer the gateway waits for the next step, s; None: unknown


class StreamOpened(msgspec.Struct, frozen=True, gc=False):
    """A gateway got no next step of a request in time and continued without the router."""

    gateway_id: str
    stream: OpenStream


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """An answer began. `refused_by`: the instances that answered this request with an error before."""

    request_id: str
    refused_by: tuple[str, ...] = ()


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A request ended."""

    request_id: str  # as in PlacementRequest
    outcome: str  # OK, CANCELLED, REJECTED, FAILED, or UNKNOWN (no evidence for or against its instance)
    prompt_tokens: int | None = None  # the engine's own count; None if it did not report it
    cached_tokens: int | None = None  # the engine's own count; None if it did not report it
    output_tokens: int | None = None  # the engine's own count; None if it did not report it
    error: str = ""  # how it failed; empty if it did not
    http_status: int = 0  # of the engine's response; 0 if there was none
    timings_ms: Mapping[str, float] | None = None  # times at the gateway, ms, by name; None if they were not measured
    refused: bool = False  # whether the request's instance answered with an error
    refused_by: tuple[str, ...] = ()  # as in FirstToken, for a request that ended without a first token
    finish_reason: str = ""  # STOP, LENGTH, ...; empty if unknown
    cached_by_tier: Mapping[int, int] | None = None  # tier (agent.v1.Tier) -> tokens, as far as known
    broke: bool = False  # whether the request's instance broke the connection
    # The instances that failed as this one did with the same request, which is therefore at fault.
    alike: tuple[str, ...] = ()
    inferred: bool = False  # whether no gateway has reported the end
    # Of cached_tokens, those that earlier steps of the request have computed; None if the gateway does not count them.
    own_cached_tokens: int | None = None

    def cache_hits(self, *, one_step: bool) -> int | None:
        """Return how many prompt tokens were cached without the request's own steps; None if unknown. `one_step`: there were no
        earlier steps."""
        if self.cached_tokens is None or (self.own_cached_tokens is None and not one_step):
            return None
        return max(self.cached_tokens - (self.own_cached_tokens or 0), 0)


class Heard(msgspec.Struct, frozen=True, gc=False):
    """A gateway has received bytes of answers since its last report of them: by instance, how long ago the last byte came, s.
    `stalled`: the requests whose answers have begun, and of which it has waited for the next bytes for long."""

    ago_s: Mapping[str, float]
    stalled: tuple[str, ...] = ()


class SessionEnded(msgspec.Struct, frozen=True, gc=False):
    """A client has ended a session: it has no owner in any pool any more. Requests that came before do not give it one again;
    later requests begin it anew. `gateway_id`: the gateway that waits for SessionEndApplied (empty: none)."""

    tenant: str
    session_id: str
    gateway_id: str = ""

    @property
    def session(self) -> str:
        """The session's name, as in PlacementRequest.session."""
        return session_name(self.tenant, self.session_id)


class GatewayReported(msgspec.Struct, frozen=True, gc=False):
    """A report of `gateway_id` (empty: a caller of the unary form) on one request.

    A gateway may report on its own requests, on those of the unary form, and on those of a gateway without a stream (their
    reservations have a lease). The same rule holds for PlaceRequested, StreamOpened and GatewayHello.
    """

    gateway_id: str
    report: StepDone | FirstToken | Finished


# ---- events: operators and time ----


class DrainsChanged(msgspec.Struct, frozen=True, gc=False):
    """The operator config drains exactly these instances from now on: instance id -> the incarnation that is drained. `moving`:
    those of them whose requests are to leave them."""

    incarnations: Mapping[str, str]
    moving: frozenset[str] = frozenset()


class OrdersChanged(msgspec.Struct, frozen=True, gc=False):
    """The operator config has exactly these orders from now on, by instance id. An order holds for every incarnation, and may
    name an instance that is not known yet."""

    orders: Mapping[str, InstanceOrder]


class PolicySet(msgspec.Struct, frozen=True, gc=False):
    """This policy is in force from now on, also for held requests. Earlier decisions stay."""

    policy: Policy


class StoreState(msgspec.Struct, frozen=True, gc=False):
    """The shared store became unreachable (`degraded`) or is reachable again."""

    degraded: bool


class PoolTaken(msgspec.Struct, frozen=True, gc=False):
    """This replica owns `pool` from now on. What the shared store has of it replaces this replica's knowledge. The pool's
    sessions follow (SessionsRead)."""

    pool: str
    reservations: tuple[Reservation, ...] = ()  # the open ones
    mean_work: MeanWork | None = None  # the earlier owner's
    idle_sessions: IdleSessions | None = None  # the earlier owner's
    idle_age_s: float = 0.0  # how old `idle_sessions` are, s
    facts: PoolFacts | None = None  # by which the earlier owner chose the pool's policy


class SessionsRead(msgspec.Struct, frozen=True, gc=False):
    """Session owners (session -> instance id) that were read from the shared store for a pool that this replica took over. An
    owner that was set since the takeover is kept instead. `last`: all have been read."""

    pool: str
    sessions: Mapping[str, str]
    last: bool = False


class PoolLost(msgspec.Struct, frozen=True, gc=False):
    """Another replica owns `pool` now, or will soon: this replica drops the pool's requests."""

    pool: str


class GoOn(msgspec.Struct, frozen=True, gc=False):
    """Apply the next part of the unfinished work (RouterState.unfinished)."""


class RetryDue(msgspec.Struct, frozen=True, gc=False):
    """The time RouterState.retry_at has been reached: retry held requests for what was freed since the last trial."""


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed: end what has expired, and retry held requests."""


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
    | Heard
    | SessionEnded
    | GatewayReported
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


class Pace(msgspec.Struct, frozen=True, gc=False):
    """Limit how often an agent sends loads and changes of keys: the minimum intervals, s; 0 without a limit."""

    stream_id: int
    load_interval_s: float
    key_interval_s: float


class Resync(msgspec.Struct, frozen=True, gc=False):
    """Request a new snapshot from an agent."""

    stream_id: int
    instance_id: str
    reason: str


class PredictionAuditFailed(msgspec.Struct, frozen=True, gc=False):
    """An instance's engine persistently reports fewer cached tokens than predicted; `reason` says by how much."""

    instance_id: str
    reason: str


class EventsDistrusted(msgspec.Struct, frozen=True, gc=False):
    """An instance's keys no longer come from its KV events, or have not so far, since these do not agree with its answers."""

    instance_id: str
    reason: str


class EventsTrusted(msgspec.Struct, frozen=True, gc=False):
    """An instance's keys come from its KV events from now on, since these agree with its answers. `again`: EventsDistrusted has
    been told of it."""

    instance_id: str
    again: bool


class RefuseReport(msgspec.Struct, frozen=True, gc=False):
    """End an agent's stream: FAILED_PRECONDITION when the instance cannot be placed, ABORTED when another stream reports
    it."""

    stream_id: int
    reason: str
    replaced: bool = False


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A request's next step, for the gateway that asked (empty: the unary form). It may come long after the question."""

    request_id: str  # as in PlacementRequest
    decision: Decision  # the last one on the request, with the steps of all parts so far
    step_index: int  # from 0, over all decisions of the plan
    step: Step  # that of `decision` with the number `step_index`
    last: bool  # whether no step follows this one
    gateway_id: str = ""  # the gateway that asked; empty: the unary form


class Refused(msgspec.Struct, frozen=True, gc=False):
    """A request cannot be placed. Nothing is reserved."""

    request_id: str  # as in PlacementRequest
    code: str  # name of the gRPC status
    message: str  # for people
    retry_after_s: float | None = None  # when to ask again, s from now; None: unknown
    gateway_id: str = ""  # the gateway that asked; empty: the unary form
    # Whether the only cause is that another replica owns the pool, or that this replica has just started.
    not_serving: bool = False
    pool: str = ""  # that of the model; empty: unknown, or none is named in this kind of refusal
    # If given, the refusal (INVALID_ARGUMENT) is only for the call that named this model, since another request has the id.
    asked_model: str | None = None
    place: int = 0  # in the queue of parked requests that it had, from 1; 0 if it was not parked
    admission: AdmissionRecord | None = None  # what the refusal of a parked request was decided on


class Parked(msgspec.Struct, frozen=True, gc=False):
    """A request waits until its session is let in."""

    request_id: str  # as in PlacementRequest
    gateway_id: str  # the gateway that asked; empty: the unary form, whose callers are not told
    pool: str  # of the model that was asked for
    place: int  # in the queue, from 1
    bound_s: float  # how long it waits from now at most


class Move(msgspec.Struct, frozen=True, gc=False):
    """A request is to leave its instance, if its gateway can have another one answer it. `lost`: the instance's agent is gone;
    else operators empty the instance, or its engine sends nothing (`silent`). `unbegun`: unless its answer has begun."""

    request_id: str  # as in PlacementRequest
    gateway_id: str  # the gateway that runs the request; never empty
    lost: bool = False
    silent: bool = False
    unbegun: bool = False


class DecisionMade(msgspec.Struct, frozen=True, gc=False):
    """A new decision, for the log."""

    decision: Decision


class DecisionNoted(msgspec.Struct, frozen=True, gc=False):
    """A note on a decision's plan, before its request has ended."""

    decision: Decision
    note: str


class DecisionClosed(msgspec.Struct, frozen=True, gc=False):
    """A decision's request ended. `decision`: with all steps of the plan; None if another router, or the gateway alone, placed
    the request."""

    decision_id: str
    finished: Finished
    decision: Decision | None


class ReportIgnored(msgspec.Struct, frozen=True, gc=False):
    """A gateway's report was ignored: another gateway has the request open, or waits for its answer."""

    request_id: str
    gateway_id: str


class PolicyTaken(msgspec.Struct, frozen=True, gc=False):
    """Another policy decides for a pool, or its sessions begin or cease to be admitted, since what is known of the pool has
    changed, or since operators chose another policy."""

    pool: str  # one that this replica owns
    policy: str  # name of the policy from now on; may equal `before` if settings or the admission differ
    reason: str  # for which `auto` takes it; empty under other policies
    before: str  # the policy until then
    before_reason: str  # as `reason`, for `before`
    facts: PoolFacts  # by which it was chosen


class LifeChanged(msgspec.Struct, frozen=True, gc=False):
    """By the evidence of its requests an instance gets none for a while (`out`), or gets them again. `reason` is for people;
    empty if it is in."""

    instance_id: str  # whose engine is out, or in again
    pool: str  # of the instance
    out: bool
    cause: str = ""  # failures, errors, silence or unreached
    reason: str = ""


class InstanceKept(msgspec.Struct, frozen=True, gc=False):
    """An instance whose agent is gone stays in the fleet, because its engine answers or no other instance of its pool has an
    agent. Its keys are not followed."""

    instance_id: str
    pool: str
    reason: str


class FleetChanged(msgspec.Struct, frozen=True, gc=False):
    """Models, instances or their readiness changed."""


class PoolForgotten(msgspec.Struct, frozen=True, gc=False):
    """A pool without open requests has had no instance for long, and was removed."""

    pool: str


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """For the shared store: a reservation was opened or changed."""

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


class SessionDisowned(msgspec.Struct, frozen=True, gc=False):
    """For the shared store: a session that has ended, and has no owner any more."""

    session: str
    pool: str


class SessionEndApplied(msgspec.Struct, frozen=True, gc=False):
    """For the gateway that reported a session's end: these pools, which this replica owns, know it. To be sent once the shared
    store has it, too."""

    gateway_id: str
    tenant: str
    session_id: str
    pools: tuple[str, ...]


class MeanWorkSet(msgspec.Struct, frozen=True, gc=False):
    """For the shared store: the mean work of a pool's requests has changed."""

    mean_work: MeanWork
    pool: str


class IdleSessionsSet(msgspec.Struct, frozen=True, gc=False):
    """For the shared store: what a pool's next owner needs of its idle sessions."""

    idle_sessions: IdleSessions
    pool: str


class PoolFactsSet(msgspec.Struct, frozen=True, gc=False):
    """For the shared store: the facts by which a pool's policy is chosen."""

    facts: PoolFacts
    pool: str


Effect = (
    Welcome
    | Pace
    | Resync
    | PredictionAuditFailed
    | EventsDistrusted
    | EventsTrusted
    | RefuseReport
    | Placed
    | Refused
    | Parked
    | Move
    | DecisionMade
    | DecisionNoted
    | DecisionClosed
    | ReportIgnored
    | PolicyTaken
    | LifeChanged
    | InstanceKept
    | FleetChanged
    | PoolForgotten
    | Reserved
    | Released
    | SessionOwnerSet
    | SessionDisowned
    | SessionEndApplied
    | MeanWorkSet
    | IdleSessionsSet
    | PoolFactsSet
)
