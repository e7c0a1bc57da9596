"""A request of a simulation, as the gateway that carries out its plan knows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from pointsman.lab.engine.prompt_content import NamedPrompt
from pointsman.lab.report.request_record import RequestRecord
from pointsman.lab.simulation.clients import Turn
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.types import Phase, PlacementRequest


@dataclass(eq=False)
class SimulatedRequest:
    """A request from its arrival to its end. `placed` is the last step that a router gave, None before the first."""

    turn: Turn
    record: RequestRecord
    prompt: NamedPrompt
    placement: PlacementRequest
    refusals: int = 0
    placed: ev.Placed | None = None
    phase: Phase = Phase.PREFILL
    # When a router was first asked, and how often one was: what an earlier one still answers is void.
    asked_at: float | None = None
    ask_count: int = 0
    # It waits for a router's word: on its first step, or on the next one.
    awaits_router: bool = False
    # How many attempts there were before this one, and whether a step of this one failed.
    attempts: int = 0
    failed: bool = False
    draw_count: int = 0
    # What the last PREFILL step left on its instance, and how long computing it took, in tokens and s.
    prefilled: int = 0
    prefill_s: float = 0.0

    def start_attempt(self) -> None:
        """Begin another attempt, which has an id of its own and no step yet. Mutates."""
        self.attempts += 1
        self.placement = structs.replace(self.placement, request_id=f"{request_id(self.turn)}.{self.attempts}")
        self.placed = self.asked_at = None

    def open_stream(self) -> ev.OpenStream:
        """How it is announced once it has a step."""
        assert self.placed is not None
        placement = structs.replace(self.placement, keys=())
        return ev.OpenStream(placement, self.placed.step.instance_id, self.phase, self.placed.decision.cached_tokens)


def request_id(turn: Turn) -> str:
    """The id of its first attempt."""
    return f"{turn.request.session}#{turn.request.turn}"


def engine_id(placed: ev.Placed) -> str:
    """What the engine calls the request of a step."""
    return f"{placed.request_id}/{placed.step_index}"
