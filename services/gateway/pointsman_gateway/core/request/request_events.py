"""The events that a request's state machine handles, and the effects that it returns."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY, EngineIdentity

NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE, INTERNAL, DEADLINE_EXCEEDED = 5, 8, 14, 13, 4
# The gateway's own code, not one of google.rpc.Code: no router assigned a step in time.
PLACEMENT_TIMEOUT = 100
# Likewise: two instances broke the connection under the same request.
BREAKS_INSTANCES = 101


class Outcome(enum.IntEnum):
    """How an attempt ended; the values are those of pointsman.router.v1.Outcome."""

    OK = 1
    CANCELLED = 2
    REJECTED = 3
    FAILED = 4


@dataclass(frozen=True)
class Target:
    """An instance to send to. `rank` is its index among the data-parallel ranks that the server at `url` serves, None if the
    server has only one.

    `kv_protocol` is its KV transfer protocol (MOONCAKE, NIXL; empty: none), `bootstrap_url` its bootstrap server's URL.
    `layerwise`: the second request of a transfer is sent before the first has ended. `can_consume_kv`: the instance can receive
    KV of another instance. `identity`: what makes it interchangeable with others.
    """

    instance_id: str  # unique in the fleet, as the router has it; ranks at one `url` have their own
    url: str
    rank: int | None = None
    incarnation: str = ""  # lifetime of the engine's process; empty: unknown
    kv_protocol: str = ""
    bootstrap_url: str = ""
    layerwise: bool = False
    can_consume_kv: bool = True
    identity: EngineIdentity = UNKNOWN_IDENTITY


@dataclass(frozen=True)
class RequestTimeouts:
    """Timeouts in seconds, and the maximum number of attempts after the first."""

    placement_s: float = 60.0  # from a request for a step, or the end of a parked request's bound, to the step
    prefill_s: float = 120.0  # duration of a PREFILL; then the request is colocated
    first_byte_s: float = 600.0  # from sending a SERVE to its first byte; if it is not streamed, to its end
    transfer_s: float = 30.0  # duration of a pull or fetch, or from a SERVE with another's KV to its first byte
    max_retries: int = 2  # attempts after a move (UpstreamFailed.moved) do not count


# Events.
@dataclass(frozen=True)
class StepAssigned:
    """The router, or the gateway without a router, assigned the next step.

    `kv_target`: the instance that answers from the KV of this PREFILL, if it is another one. `kv_source`: the instance that has
    the KV for this SERVE, or that has the tokens of this PREFILL cached, which are fetched from there and not computed.
    `runner_up`: id of the instance with the best score besides the target; empty if it is not known.
    `doubted`: the target's last answer was an error, or it has not answered yet, and there are others: if it rejects the request,
    another one is asked.
    """

    attempt_id: str  # a step for an earlier attempt is ignored
    target: Target  # the instance that carries out the step
    index: int = 0  # of the step in the attempt, from 0
    prefill_tokens: int = 0  # 0: SERVE
    decision_id: str = ""  # the router's; empty: the gateway chose
    cached_tokens: int = 0  # of the prompt at the target, as predicted
    degraded: bool = False  # placed while the routers' shared store was away, or by the gateway alone
    kv_target: Target | None = None
    kv_source: Target | None = None
    runner_up: str = ""
    doubted: bool = False

    @property
    def fetches(self) -> bool:
        """Whether the step gets its tokens from the prefix cache of another instance."""
        return bool(self.prefill_tokens) and self.kv_source is not None

    @property
    def beside(self) -> Target | None:
        """The instance to which a request is sent together with this PREFILL's own, since both push KV layer by layer; None: the
        requests of a transfer are sent in turn."""
        other = (self.kv_source or self.kv_target) if self.prefill_tokens else None
        return other if other is not None and other.layerwise and self.target.layerwise else None


@dataclass(frozen=True)
class PlacementRefused:
    """The placement was refused; the router holds no reservation. `code` as in Refusal (4, 5, 8, 14). `place`: the place among
    parked requests that it had; 0 for none."""

    attempt_id: str  # a refusal of an earlier attempt is ignored
    code: int
    message: str  # for the client
    retry_after_s: float | None = None  # None: the router named no time; failures.py has the default
    place: int = 0


@dataclass(frozen=True)
class RequestParked:
    """The router lets the request wait until the caches have room for its session, for at most `bound_s` from now."""

    attempt_id: str
    bound_s: float


@dataclass(frozen=True)
class RouterLost:
    """The router was lost before it assigned the next step."""

    attempt_id: str


@dataclass(frozen=True)
class PrefillEnded:
    """A PREFILL step ended; `error` is empty if it succeeded. `instance_failed`: an instance caused the failure. `refused`: it
    answered 5xx, which the request itself may have caused. `broke`: it broke the connection."""

    error: str = ""
    instance_failed: bool = False
    refused: bool = False
    broke: bool = False
    instance_id: str = ""  # which instance did; empty: the step's own


@dataclass(frozen=True)
class PullEnded:
    """A pull ended; `error` is empty if the KV has been transferred."""

    error: str = ""


@dataclass(frozen=True)
class ResponseStarted:
    """The first byte of a 200 answer was received."""


@dataclass(frozen=True)
class ResponseRejected:
    """The instance answered 4xx, or the gateway rejects the answer (`own`: too long, no memory for it). A retry at another
    instance would not help, unless the instance is doubted; the client gets the error."""

    status: int
    own: bool = False


@dataclass(frozen=True)
class ResponseEnded:
    """The answer ended. `error` is the failure that the instance itself reported in the stream; empty: success."""

    error: str = ""


@dataclass(frozen=True)
class UpstreamFailed:
    """The connection was refused or lost, or the instance answered 5xx or was silent. `status` is 0 without an answer. `refused`:
    the instance answered 5xx, which the request or the instance may have caused. `continuable`: another instance can go on with
    the stream. `innocent`: the instance works, but not for this request. `moved`: so it does, and the gateway itself has ended
    the attempt, because operators empty the instance, or it is silent. `broke`: the instance broke the connection after it had
    the request, which may have killed the engine. `unreached`: it has not got the request. `progressed`: after a good part of an
    answer."""

    error: str  # without addresses, since routers and logs get it
    status: int = 0
    refused: bool = False
    continuable: bool = False
    innocent: bool = False
    moved: bool = False
    broke: bool = False
    unreached: bool = False
    progressed: bool = False


@dataclass(frozen=True)
class OtherAnswered:
    """A proxy that was given several instances got no answer of the step's, and one of `target`."""

    target: Target


@dataclass(frozen=True)
class ClientDisconnected:
    """The client closed its connection."""


@dataclass(frozen=True)
class Tick:
    """Time passed; the deadline may have expired."""


Event = (
    StepAssigned
    | PlacementRefused
    | RequestParked
    | RouterLost
    | PrefillEnded
    | PullEnded
    | ResponseStarted
    | ResponseRejected
    | ResponseEnded
    | UpstreamFailed
    | OtherAnswered
    | ClientDisconnected
    | Tick
)


# Effects.
@dataclass(frozen=True)
class AskRouter:
    """Request an attempt's first step from the router. `exclude`: instances that failed. `computed_at`: the instance that has
    computed a part of the prompt, and serves it if no router answers; empty: any may."""

    attempt_id: str
    exclude: tuple[str, ...]
    computed_at: str = ""


@dataclass(frozen=True)
class AdoptInstance:
    """Begin an attempt at the step's instance, which has answered without a placement."""

    step: StepAssigned


@dataclass(frozen=True)
class AskNextStep:
    """Report a step's end, and wait for the next step."""

    attempt_id: str
    index: int
    error: str
    instance_failed: bool = False


@dataclass(frozen=True)
class Prefill:
    """Send the prompt's first tokens to an instance, to compute their KV. If the step has a source, the instance fetches it from
    there."""

    step: StepAssigned


@dataclass(frozen=True)
class ReportStepDone:
    """Report a step's end without waiting for the next step, which is already under way."""

    attempt_id: str
    index: int


@dataclass(frozen=True)
class PullKv:
    """Make the step's instance pull the prompt's KV from the step's source. `early`: while the source still computes it."""

    step: StepAssigned
    early: bool = False


@dataclass(frozen=True)
class Serve:
    """Send the request to an instance and forward its answer. If the step has a source, the request carries its KV transfer
    parameters. `early`: while the source still computes the KV."""

    step: StepAssigned
    early: bool = False


@dataclass(frozen=True)
class AdoptEarlyStep:
    """Record the early step, which was sent before it was assigned, as the current step."""

    step: StepAssigned


@dataclass(frozen=True)
class AbortUpstream:
    """Close all open upstream connections of the attempt, and cancel what waits for them."""


@dataclass(frozen=True)
class ReportFirstToken:
    """Report the first byte. `refused_by`: the instances that answered earlier attempts or steps of the request with an error, or
    failed as the source of a fetch."""

    attempt_id: str
    refused_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportFinished:
    """Report an attempt's end. `error` contains no address. `refused`: the instance answered with an error, and `broke`: it broke
    the connection, which the request itself may have caused. `alike`: the instances that failed so at earlier attempts, so that
    the request is at fault. `refused_by`: as in ReportFirstToken, for an attempt that is rejected without a first token.
    `continued`: the next attempt goes on with its answer, and has the usage of the whole."""

    attempt_id: str  # the request's id, from the second attempt on with .1, .2 ...
    outcome: Outcome  # the attempt's; the request may go on with another one
    error: str = ""
    status: int = 0  # HTTP status of the failure; 0: that of the open answer counts, if there is one
    refused: bool = False
    refused_by: tuple[str, ...] = ()
    continued: bool = False
    broke: bool = False
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportServedAlone:
    """Report that the gateway chose the next step itself. A step that the router still sends for the attempt is void."""

    attempt_id: str


@dataclass(frozen=True)
class FailRequest:
    """Answer the client with an error. `code` as in Refusal, or INTERNAL if instances failed, or PLACEMENT_TIMEOUT, or
    BREAKS_INSTANCES. `place` as in PlacementRefused."""

    code: int
    message: str
    retry_after_s: float | None = None
    place: int = 0


@dataclass(frozen=True)
class EndStreamWithError:
    """End the client's stream with an error event."""


Effect = (
    AskRouter
    | AdoptInstance
    | AskNextStep
    | ReportStepDone
    | Prefill
    | PullKv
    | Serve
    | AdoptEarlyStep
    | AbortUpstream
    | ReportFirstToken
    | ReportFinished
    | ReportServedAlone
    | FailRequest
    | EndStreamWithError
)
