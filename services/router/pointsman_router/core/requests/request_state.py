"""The state of one request in the router, and the transitions that led to it. Pure; times in s on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import msgspec

from pointsman_router.core.learning.prefill_progress import NO_KEYS, OpenPrompt
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import Decision, Phase, PlacementRequest
from pointsman_router.core.requests.hold_queue import HeldRequest

# MAX_STORY: maximum number of transitions in a story. FIRST_OF_STORY: how many of them are the first ones; the others are the
# last. The story is bounded since a plan may have thousands of slices, and many requests are open.
MAX_STORY, FIRST_OF_STORY = 12, 4


class Stage(StrEnum):
    """The stage of a request, from its arrival to its end."""

    NEW = "new"
    HELD = "held"
    PREFILLING = "prefilling"
    BETWEEN_STEPS = "held between steps"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a request's state, and the stages in which it is allowed. Each transition is a method of RequestTable."""

    name: str
    allowed: tuple[Stage, ...]


HOLD = Transition("held", (Stage.NEW, Stage.PREFILLING))
PLACE = Transition("placed", (Stage.NEW, Stage.HELD, Stage.PREFILLING, Stage.BETWEEN_STEPS))
# A gateway may announce any request that it runs, whatever the router knows of it.
ANNOUNCE = Transition("announced", tuple(Stage))
COMPUTE = Transition("step computed", (Stage.PREFILLING,))
FIRST_TOKEN = Transition("first token", (Stage.PREFILLING,))
END = Transition("ended", (Stage.PREFILLING, Stage.BETWEEN_STEPS, Stage.DECODING))


class InvalidTransitionError(RuntimeError):
    """A transition was attempted in a stage that does not allow it. A bug of the router; the message has the request's story."""


class RequestState(msgspec.Struct, gc=False):
    """All that is known of one request. Only RequestTable changes it, and updates each index with the change."""

    request_id: str  # as in PlacementRequest
    # The request waits for its first step or, if it has a reservation, for the rest of its plan.
    held: HeldRequest | None = None
    reservation: Reservation | None = None  # that of its current step, the same object as in Reservations
    prompt: OpenPrompt | None = None  # the progress of this step
    # The last decision, with all steps of the plan so far; after the end it marks the id as used.
    decision: Decision | None = None
    # The request as its gateway announced it, if this router has no decision on it and it can be moved.
    announced: PlacementRequest | None = None
    counted: str = ""  # the name under which session admission counts its session; empty if it does not
    # Time, name and detail of each transition, one after another in one flat tuple, so that a story is a single object.
    story: tuple[float | str, ...] = ()

    @property
    def stage(self) -> Stage:
        """The stage, derived from the other fields; it is not stored."""
        if self.reservation is None:
            if self.held is not None:
                return Stage.HELD
            return Stage.NEW if self.decision is None else Stage.ENDED
        if self.held is not None:
            return Stage.BETWEEN_STEPS
        return Stage.DECODING if self.reservation.phase is Phase.DECODE else Stage.PREFILLING

    @property
    def pool(self) -> str:
        """The pool of the request; empty if unknown."""
        known = self.reservation or self.held or self.decision
        return known.pool if known is not None else ""

    @property
    def keys(self) -> Sequence[int]:
        """The block keys of the prompt; empty if unknown."""
        return self.prompt.keys if self.prompt is not None else NO_KEYS

    @property
    def request(self) -> PlacementRequest | None:
        """The request, if known."""
        return self.decision.request if self.decision is not None else self.announced

    @property
    def opened_at(self) -> float:
        """When the current step was reserved; inf without a step."""
        return self.prompt.opened_at if self.prompt is not None else inf

    @property
    def plan(self) -> Decision | None:
        """The decision to whose plan the reservation belongs; None if an earlier owner, or the gateway alone, placed the
        request."""
        reservation, decision = self.reservation, self.decision
        if reservation is None or decision is None or decision.decision_id != reservation.decision_id:
            return None
        return decision if reservation.step_index < len(decision.result.steps) else None

    def require(self, transition: Transition) -> None:
        """Raise InvalidTransitionError if the current stage does not allow `transition`."""
        if self.stage not in transition.allowed:
            raise InvalidTransitionError(f"{self.request_id!r} cannot be {transition.name!r}: it is {self.tell()}")

    def happened(self, transition: Transition, now: float, detail: str = "") -> None:
        """Add a transition to the story. `detail`: an instance, a reason or an outcome. Mutates."""
        story = self.story
        if len(story) >= 3 * MAX_STORY:
            story = story[: 3 * FIRST_OF_STORY] + story[3 * FIRST_OF_STORY + 3 :]
        self.story = (*story, now, transition.name, detail)

    def tell(self) -> str:
        """Return the stage and the story in one line, for errors; times are on the router's clock."""
        lines = zip(self.story[::3], self.story[1::3], self.story[2::3], strict=True)
        story = ", then ".join(f"{name}{detail and ': '}{detail} at {at:.3f} s" for at, name, detail in lines)
        return f"{self.stage.value} ({story})" if story else self.stage.value
