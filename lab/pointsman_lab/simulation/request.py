"""A request of a simulation, in the view of the gateway that executes its plan. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec import structs

from pointsman_gateway.core.request.own_prefills import OwnPrefills
from pointsman_gateway.core.request.request_events import AskRouter, Event, FailRequest, RequestTimeouts, StepAssigned
from pointsman_gateway.core.request.request_state_machine import Phase, RequestStateMachine
from pointsman_lab.engine.prompt_content import NamedPrompt
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.clients import Turn
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.placement_types import Phase as RouterPhase
from pointsman_router.core.placement_types import PlacementRequest


@dataclass(eq=False)
class SimulatedRequest:
    """A request from its arrival to its end."""

    turn: Turn  # replaced when an admission rule of the lab chooses the instance
    record: RequestRecord  # written as the request proceeds, complete at its end
    prompt: NamedPrompt  # as names, for the engines; all attempts have the same
    placement: PlacementRequest  # with the id of the current attempt
    # Of the client's current request; None before the client has sent one.
    state_machine: RequestStateMachine | None = None
    # Number of times that the client was refused and retried.
    refusals: int = 0
    # Time of the current attempt's first placement request to a router, s; None before it.
    asked_at: float | None = None
    # End of the bound within which a router has parked the current attempt, s; None: it was not parked.
    parked_until: float | None = None
    # The instance that has computed a part of the prompt and serves it if no router answers; empty: any may.
    computed_at: str = ""
    # The instance where the current attempt is open, and whether its answer has begun there.
    open_at: str = ""
    began: bool = False  # its first token has come from there
    # Number of requests to routers. A router's answer to any but the last one is void.
    questions: int = 0
    # What is open upstream: instance and the engine's name for it; ("", "") for nothing.
    upstream: tuple[str, str] = ("", "")
    # Events that occurred while an effect was carried out; the state machine handles them next.
    follow_ups: deque[Event] = field(default_factory=deque)
    # Time of the state machine's next scheduled tick, s; None: no tick is scheduled.
    tick_at: float | None = None
    failure: FailRequest | None = None  # the error for the client's current request; None: it has not failed
    # Whether the client has disconnected.
    left: bool = False
    # The engine's message when it rejected the request.
    rejection: str = ""
    draw_count: int = 0  # number of random delays drawn so far, over all attempts
    # Result of the last PREFILL step: tokens that it left on its instance, and its computing time in s.
    prefilled: int = 0
    prefill_s: float = 0.0  # as one chunk, without the constant part of a step
    found_at_source: int = 0  # tokens of the prompt that the source of the current fetch had cached
    # What earlier steps have computed, and how much of it is among the answer's cached tokens.
    own_prefills: OwnPrefills = field(default_factory=OwnPrefills)
    own_cached: int = 0  # tokens; record.cached_tokens does not include them

    def begin(self, timeouts: RequestTimeouts) -> RequestStateMachine:
        """Start the client's request, for the first time or as a retry; every retry has its own id. Mutates."""
        self.state_machine = RequestStateMachine(self._id, timeouts)
        self.placement = structs.replace(self.placement, request_id=self._id, exclude=self.turn.exclude)
        self.asked_at = self.tick_at = self.failure = self.parked_until = None
        return self.state_machine

    def begin_attempt(self, asked: AskRouter) -> None:
        """Start another attempt. Mutates."""
        self.asked_at = self.tick_at = self.parked_until = None
        self.computed_at = asked.computed_at
        exclude = *self.turn.exclude, *asked.exclude
        self.placement = structs.replace(self.placement, request_id=asked.attempt_id, exclude=exclude)

    @property
    def _id(self) -> str:
        return f"{request_id(self.turn)}/again{self.refusals}" if self.refusals else request_id(self.turn)

    @property
    def draw_id(self) -> str:
        """Key of the request's random draws. A retry of the client has the same keys as the first request."""
        return request_id(self.turn) + self.placement.request_id.removeprefix(self._id)

    @property
    def step(self) -> StepAssigned | None:
        """The newest step, while its attempt is open."""
        machine = self.state_machine
        return machine.step if machine is not None and machine.phase is not Phase.DONE else None

    @property
    def asks_first_step(self) -> bool:
        """Whether the request waits for its first step."""
        return self.state_machine is not None and self.state_machine.phase is Phase.PLACING

    @property
    def asks_next_step(self) -> bool:
        """Whether the request waits for the step after one that has ended."""
        return self.state_machine is not None and self.state_machine.phase is Phase.AWAITING_NEXT_STEP

    def open_stream(self) -> ev.OpenStream:
        """Return how the gateway reports the request, which must have a step, to a router."""
        assert self.state_machine is not None
        step = self.step
        assert step is not None
        phase = RouterPhase.DECODE if self.state_machine.phase is Phase.STREAMING else RouterPhase.PREFILL
        placement = structs.replace(self.placement, keys=())
        return ev.OpenStream(placement, step.target.instance_id, phase, step.cached_tokens)


def request_id(turn: Turn) -> str:
    """Return the id of a turn's first attempt."""
    return f"{turn.request.session}#{turn.request.turn}"


def engine_id(step: StepAssigned) -> str:
    """Return the engine's request id of a step."""
    return f"{step.attempt_id}/{step.index}"
