"""The events that a request's state machine is told, and the effects that it answers with."""

from __future__ import annotations

import enum
from dataclasses import dataclass

NOT_FOUND, RESOURCE_EXHAUSTED, UNAVAILABLE, INTERNAL, DEADLINE_EXCEEDED = 5, 8, 14, 13, 4
# Of our own, beyond google.rpc.Code: no router named a step in time.
PLACEMENT_TIMEOUT = 100


class Outcome(enum.IntEnum):
    """How an attempt ended; the values are those of pointsman.router.v1.Outcome."""

    OK = 1
    CANCELLED = 2
    REJECTED = 3
    FAILED = 4


@dataclass(frozen=True)
class Target:
    """An instance to send to; `rank` is its data-parallel rank, None where there is only one.

    `kv_protocol` says how it passes KV on (MOONCAKE, NIXL; empty: not at all), `bootstrap_url` its bootstrap server's URL.
    `layerwise`: it wants the second request of a transfer before the first ended; `can_consume_kv`: it can be the second side.
    """

    instance_id: str
    url: str
    rank: int | None = None
    incarnation: str = ""
    kv_protocol: str = ""
    bootstrap_url: str = ""
    layerwise: bool = False
    can_consume_kv: bool = True


@dataclass(frozen=True)
class RequestTimeouts:
    """Deadlines in seconds, and how many attempts follow the first."""

    placement_s: float = 60.0
    prefill_s: float = 120.0
    first_byte_s: float = 600.0
    transfer_s: float = 30.0
    max_retries: int = 2


# What happened.
@dataclass(frozen=True)
class StepAssigned:
    """The router's (or the gateway's own) next step.

    `kv_target`: who answers from the KV of this PREFILL, where it is another instance. `kv_source`: who has it for this SERVE.
    """

    attempt_id: str
    target: Target
    index: int = 0
    prefill_tokens: int = 0  # 0: SERVE
    decision_id: str = ""
    cached_tokens: int = 0
    degraded: bool = False
    kv_target: Target | None = None
    kv_source: Target | None = None


@dataclass(frozen=True)
class PlacementRefused:
    """No placement; nothing is reserved. `code` as in Refusal (4, 5, 8, 14)."""

    attempt_id: str
    code: int
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True)
class RouterLost:
    """The router went away before it answered, and did not come back within the grace."""

    attempt_id: str


@dataclass(frozen=True)
class PrefillEnded:
    """A PREFILL step is over; `error` is empty when it is done. `instance_failed`: its instance is to blame. `refused`: it
    answered 5xx, which may be the request's own fault as well."""

    error: str = ""
    instance_failed: bool = False
    refused: bool = False


@dataclass(frozen=True)
class PullEnded:
    """A pull is over; `error` is empty when the KV is there."""

    error: str = ""


@dataclass(frozen=True)
class ResponseStarted:
    """The first byte of a 200 answer came."""


@dataclass(frozen=True)
class ResponseRejected:
    """The instance answered 4xx, or what no other instance would answer otherwise; the answer goes to the client as it is."""

    status: int


@dataclass(frozen=True)
class ResponseEnded:
    """The answer is over. `error` is what the instance itself told the client when it failed on the way; empty: all is well."""

    error: str = ""


@dataclass(frozen=True)
class UpstreamFailed:
    """Connection refused or lost, 5xx, or silence. `status` is 0 when no answer came. `refused`: the instance answered 5xx, which
    may be the request's own fault as well as the instance's."""

    error: str
    status: int = 0
    refused: bool = False


@dataclass(frozen=True)
class ClientDisconnected:
    """The client closed its side."""


@dataclass(frozen=True)
class Tick:
    """Time passed; the deadline may be over."""


Event = (
    StepAssigned
    | PlacementRefused
    | RouterLost
    | PrefillEnded
    | PullEnded
    | ResponseStarted
    | ResponseRejected
    | ResponseEnded
    | UpstreamFailed
    | ClientDisconnected
    | Tick
)


# What to do.
@dataclass(frozen=True)
class AskRouter:
    """Ask the router for an attempt's first step."""

    attempt_id: str
    exclude: tuple[str, ...]


@dataclass(frozen=True)
class PlaceLocally:
    """Place without a router, degraded."""

    attempt_id: str
    exclude: tuple[str, ...]


@dataclass(frozen=True)
class AskNextStep:
    """Report a step's end; the next step follows."""

    attempt_id: str
    index: int
    error: str
    instance_failed: bool = False


@dataclass(frozen=True)
class Prefill:
    """Send the prompt's first tokens to an instance, for no output."""

    step: StepAssigned


@dataclass(frozen=True)
class ReportStepDone:
    """Report a step's end; nobody waits for the next one, which is under way."""

    attempt_id: str
    index: int


@dataclass(frozen=True)
class PullKv:
    """Let an instance fetch the prompt's KV from the step's source. `early`: while the source still computes it."""

    step: StepAssigned
    early: bool = False


@dataclass(frozen=True)
class Serve:
    """Send the request to an instance, with the way to the step's source where it has one, and pass its answer on. `early`: while
    the source still computes its KV."""

    step: StepAssigned
    early: bool = False


@dataclass(frozen=True)
class AdoptEarlyStep:
    """The step that was sent ahead is the one that is being done."""

    step: StepAssigned


@dataclass(frozen=True)
class AbortUpstream:
    """Close what is open upstream, and wait for nothing any more."""


@dataclass(frozen=True)
class ReportFirstToken:
    """Report the first byte. `refused_by`: the instances that answered 5xx to earlier attempts of the request."""

    attempt_id: str
    refused_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportFinished:
    """Report an attempt's end. `error` names no address. `refused`: the instance answered 5xx, which may be the request's own
    fault. `refused_by`: as in ReportFirstToken, where the attempt ends without one."""

    attempt_id: str
    outcome: Outcome
    error: str = ""
    status: int = 0
    refused: bool = False
    refused_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportServedAlone:
    """Report that the attempt goes on where it is, without the router's next step, which is void if it still comes."""

    attempt_id: str


@dataclass(frozen=True)
class FailRequest:
    """Answer the client with an error; `code` as in Refusal, or 13 when instances failed, 4 when time ran out."""

    code: int
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True)
class EndStreamWithError:
    """End the client's stream with an error event."""


Effect = (
    AskRouter
    | PlaceLocally
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
