"""A request of a simulation, as the gateway that carries out its plan knows it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from msgspec import structs

from pointsman.gateway.core.request.request_events import Event, FailRequest, RequestTimeouts, StepAssigned
from pointsman.gateway.core.request.request_state_machine import Phase, RequestStateMachine
from pointsman.lab.engine.prompt_content import NamedPrompt
from pointsman.lab.report.request_record import RequestRecord
from pointsman.lab.simulation.clients import Turn
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.types import Phase as RouterPhase
from pointsman.router.core.types import PlacementRequest


@dataclass(eq=False)
class SimulatedRequest:
    """A request from its arrival to its end. `placement` has the id of the attempt under way; `state_machine` is that of the
    client's present question, None before the first one is asked."""

    turn: Turn
    record: RequestRecord
    prompt: NamedPrompt
    placement: PlacementRequest
    state_machine: RequestStateMachine | None = None
    # How often its client was refused and came again.
    refusals: int = 0
    # When a router was first asked on this attempt (s), and how often one was asked anything: what is still answered to an
    # earlier question is void.
    asked_at: float | None = None
    questions: int = 0
    # What is open upstream: instance and the engine's name for it; ("", "") for nothing.
    upstream: tuple[str, str] = ("", "")
    # What happened while an effect was carried out, and has to be told to the state machine next.
    follow_ups: deque[Event] = field(default_factory=deque)
    # When the state machine is told the time next, of what is planned; None: not.
    tick_at: float | None = None
    failure: FailRequest | None = None
    # What the engine said when it rejected the request.
    rejection: str = ""
    draw_count: int = 0
    # What the last PREFILL step left on its instance, and how long computing it took, in tokens and s.
    prefilled: int = 0
    prefill_s: float = 0.0

    def begin(self, timeouts: RequestTimeouts) -> RequestStateMachine:
        """The client asks, for the first time or again: every time it is another request. Mutates."""
        self.state_machine = RequestStateMachine(self._id, timeouts)
        self.placement = structs.replace(self.placement, request_id=self._id, exclude=self.turn.exclude)
        self.asked_at = self.tick_at = self.failure = None
        return self.state_machine

    def begin_attempt(self, attempt_id: str, exclude: tuple[str, ...]) -> None:
        """Another attempt, or the same one asked anew. Mutates."""
        if attempt_id != self.placement.request_id:
            self.asked_at = self.tick_at = None
        self.placement = structs.replace(self.placement, request_id=attempt_id, exclude=(*self.turn.exclude, *exclude))

    @property
    def _id(self) -> str:
        return f"{request_id(self.turn)}/again{self.refusals}" if self.refusals else request_id(self.turn)

    @property
    def draw_id(self) -> str:
        """What its random times are drawn by: the same for an attempt of a client that had to come again."""
        return request_id(self.turn) + self.placement.request_id.removeprefix(self._id)

    @property
    def step(self) -> StepAssigned | None:
        """Its newest step, as long as its attempt is open."""
        machine = self.state_machine
        return machine.step if machine is not None and machine.phase is not Phase.DONE else None

    @property
    def asks_first_step(self) -> bool:
        """Whether it waits for its first step."""
        return self.state_machine is not None and self.state_machine.phase is Phase.PLACING

    @property
    def asks_next_step(self) -> bool:
        """Whether it waits for the step after one that is over."""
        return self.state_machine is not None and self.state_machine.phase is Phase.AWAITING_NEXT_STEP

    def open_stream(self) -> ev.OpenStream:
        """How it is announced once it has a step."""
        assert self.state_machine is not None
        step = self.step
        assert step is not None
        phase = RouterPhase.DECODE if self.state_machine.phase is Phase.STREAMING else RouterPhase.PREFILL
        placement = structs.replace(self.placement, keys=())
        return ev.OpenStream(placement, step.target.instance_id, phase, step.cached_tokens)


def request_id(turn: Turn) -> str:
    """The id of its first attempt."""
    return f"{turn.request.session}#{turn.request.turn}"


def engine_id(step: StepAssigned) -> str:
    """What the engine calls the request of a step."""
    return f"{step.attempt_id}/{step.index}"
