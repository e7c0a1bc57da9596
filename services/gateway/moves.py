"""The words of a request's choreography: events that it is told, effects that it answers with. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

NOT_FOUND, SATURATED, UNAVAILABLE, FAILED, TIMED_OUT = 5, 8, 14, 13, 4


class Outcome(enum.IntEnum):
    """How an attempt ended; the values are those of pointsman.router.v1.Outcome."""

    OK = 1
    CANCELLED = 2
    REJECTED = 3
    FAILED = 4


@dataclass(frozen=True)
class Target:
    """An instance to send to; `rank` is its data-parallel rank, None where there is only one.

    `kv_protocol` says how it passes KV on (MOONCAKE, NIXL; empty: not at all), `bootstrap` is its bootstrap server's base URL.
    `decode_first`: it wants the second request of a transfer before the first has ended; `takes_kv`: it can be the second side.
    """

    instance_id: str
    url: str
    rank: int | None = None
    incarnation: str = ""
    kv_protocol: str = ""
    bootstrap: str = ""
    decode_first: bool = False
    takes_kv: bool = True


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds, and how many attempts follow the first."""

    place_s: float = 60.0
    prefill_s: float = 600.0
    first_byte_s: float = 600.0
    transfer_s: float = 30.0
    retries: int = 2


# What happened.
@dataclass(frozen=True)
class StepGiven:
    """The router's (or the gateway's own) next step. `deadline_s` 0: none of its own.

    `kv_target`: who answers from the KV of this PREFILL, where it is another instance. `kv_source`: who has it for this SERVE.
    """

    attempt_id: str
    target: Target
    index: int = 0
    prefill_tokens: int = 0  # 0: SERVE
    deadline_s: float = 0.0
    decision_id: str = ""
    cached_tokens: int = 0
    degraded: bool = False
    kv_target: Target | None = None
    kv_source: Target | None = None


@dataclass(frozen=True)
class Refused:
    """No placement; nothing is reserved. `code` as in Refusal (5, 8, 14)."""

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
    """A PREFILL step is over; `error` is empty when it is done. `instance_failed`: its instance is to blame."""

    error: str = ""
    instance_failed: bool = False


@dataclass(frozen=True)
class PullEnded:
    """A pull is over; `error` is empty when the KV is there."""

    error: str = ""


@dataclass(frozen=True)
class AnswerBegan:
    """The first byte of a 200 answer came."""


@dataclass(frozen=True)
class AnswerRejected:
    """The instance answered 4xx; the answer goes to the client as it is."""

    status: int


@dataclass(frozen=True)
class AnswerEnded:
    """The answer is over. `error` is what the instance itself told the client when it failed on the way; empty: all is well."""

    error: str = ""


@dataclass(frozen=True)
class UpstreamFailed:
    """Connection refused or lost, 5xx, or silence. `status` is 0 when no answer came."""

    error: str
    status: int = 0


@dataclass(frozen=True)
class ClientGone:
    """The client closed its side."""


@dataclass(frozen=True)
class Tick:
    """Time passed; the deadline may be over."""


Event = (
    StepGiven
    | Refused
    | RouterLost
    | PrefillEnded
    | PullEnded
    | AnswerBegan
    | AnswerRejected
    | AnswerEnded
    | UpstreamFailed
    | ClientGone
    | Tick
)


# What to do.
@dataclass(frozen=True)
class Ask:
    """Ask the router for an attempt's first step."""

    attempt_id: str
    exclude: tuple[str, ...]


@dataclass(frozen=True)
class AskLocally:
    """Place without a router, degraded."""

    attempt_id: str
    exclude: tuple[str, ...]


@dataclass(frozen=True)
class AwaitNext:
    """Report a step's end; the next step follows."""

    attempt_id: str
    index: int
    error: str
    instance_failed: bool = False


@dataclass(frozen=True)
class Prefill:
    """Send the prompt's first tokens to an instance, for no output."""

    step: StepGiven


@dataclass(frozen=True)
class StepOver:
    """Report a step's end; nobody waits for the next one, which is under way."""

    attempt_id: str
    index: int


@dataclass(frozen=True)
class Pull:
    """Let an instance fetch the prompt's KV from the step's source. `ahead`: while the source still computes it."""

    step: StepGiven
    ahead: bool = False


@dataclass(frozen=True)
class Serve:
    """Send the request to an instance, with the way to the step's source where it has one, and pass its answer on. `ahead`: while
    the source still computes its KV."""

    step: StepGiven
    ahead: bool = False


@dataclass(frozen=True)
class TakeUp:
    """The step that was sent ahead is the one that is being done."""

    step: StepGiven


@dataclass(frozen=True)
class Abort:
    """Close what is open upstream, and wait for nothing any more."""


@dataclass(frozen=True)
class FirstToken:
    """Report the first byte."""

    attempt_id: str


@dataclass(frozen=True)
class Finished:
    """Report an attempt's end. `error` names no address."""

    attempt_id: str
    outcome: Outcome
    error: str = ""
    status: int = 0


@dataclass(frozen=True)
class Fail:
    """Answer the client with an error; `code` as in Refusal, or 13 when instances failed, 4 when time ran out."""

    code: int
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True)
class BreakStream:
    """End the client's stream with an error event."""


Effect = (
    Ask
    | AskLocally
    | AwaitNext
    | StepOver
    | Prefill
    | Pull
    | Serve
    | TakeUp
    | Abort
    | FirstToken
    | Finished
    | Fail
    | BreakStream
)
