"""One request in the router: what is known of it, and by which transitions it came to that. Pure; times in s on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import msgspec

from pointsman.router.core.learning.prefill_progress import NO_KEYS, OpenPrompt
from pointsman.router.core.load.reservations import Reservation
from pointsman.router.core.requests.hold_queue import HeldRequest
from pointsman.router.core.types import Decision, Phase

# Transitions that a story tells, the first ones and the last: a plan may have thousands of slices, and many requests are open.
MAX_STORY, FIRST_OF_STORY = 12, 4


class Stage(StrEnum):
    """Where a request is between its first question and its end."""

    NEW = "new"
    HELD = "held"
    PREFILLING = "prefilling"
    BETWEEN_STEPS = "held between steps"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Transition:
    """What can happen to a request, and in which stages. Each is a method of OpenRequests."""

    name: str
    allowed: tuple[Stage, ...]


HOLD = Transition("held", (Stage.NEW, Stage.PREFILLING))
PLACE = Transition("placed", (Stage.NEW, Stage.HELD, Stage.PREFILLING, Stage.BETWEEN_STEPS))
# A gateway may announce whatever it runs, wherever it was known to be.
ANNOUNCE = Transition("announced", tuple(Stage))
COMPUTE = Transition("step computed", (Stage.PREFILLING,))
FIRST_TOKEN = Transition("first token", (Stage.PREFILLING,))
END = Transition("ended", (Stage.PREFILLING, Stage.BETWEEN_STEPS, Stage.DECODING))


class InvalidTransitionError(RuntimeError):
    """Something was to happen to a request that cannot happen to it as it is. A fault of the router's own; tells its story."""


class RequestState(msgspec.Struct, gc=False):
    """All that is known of one request. OpenRequests alone changes it, and tells each index of the change.

    `held`: it waits, for its first step or, beside a reservation, for the rest of its plan. `reservation`: what its current step
    takes, as the index of reservations has it. `prompt`: how far that step is. `decision`: the last one on it, its plan's steps
    so far included; of a request that has ended it shows that the id is used up.
    """

    request_id: str
    held: HeldRequest | None = None
    reservation: Reservation | None = None
    prompt: OpenPrompt | None = None
    decision: Decision | None = None
    # Time, transition and detail of each, one after another: one object, however long it is.
    story: tuple[float | str, ...] = ()

    @property
    def stage(self) -> Stage:
        """Follows from what is known; nothing keeps it."""
        if self.reservation is None:
            if self.held is not None:
                return Stage.HELD
            return Stage.NEW if self.decision is None else Stage.ENDED
        if self.held is not None:
            return Stage.BETWEEN_STEPS
        return Stage.DECODING if self.reservation.phase is Phase.DECODE else Stage.PREFILLING

    @property
    def pool(self) -> str:
        """The pool that it is, or was, in; empty where nothing is known of it."""
        known = self.reservation or self.held or self.decision
        return known.pool if known is not None else ""

    @property
    def keys(self) -> Sequence[int]:
        """The keys of its prompt; empty when unknown."""
        return self.prompt.keys if self.prompt is not None else NO_KEYS

    @property
    def opened_at(self) -> float:
        """When its current step was reserved; inf without one."""
        return self.prompt.opened_at if self.prompt is not None else inf

    @property
    def plan(self) -> Decision | None:
        """The decision of which its reservation is a step; None where an earlier owner, or its gateway alone, has placed it."""
        reservation, decision = self.reservation, self.decision
        if reservation is None or decision is None or decision.decision_id != reservation.decision_id:
            return None
        return decision if reservation.step_index < len(decision.result.steps) else None

    def require(self, transition: Transition) -> None:
        """Raise InvalidTransitionError unless `transition` may happen now."""
        if self.stage not in transition.allowed:
            raise InvalidTransitionError(f"{self.request_id!r} cannot be {transition.name!r}: it is {self.tell()}")

    def happened(self, transition: Transition, now: float, detail: str = "") -> None:
        """Add a line to the story, `detail` being an instance, a reason or an outcome. Mutates."""
        story = self.story
        if len(story) >= 3 * MAX_STORY:
            story = story[: 3 * FIRST_OF_STORY] + story[3 * FIRST_OF_STORY + 3 :]
        self.story = (*story, now, transition.name, detail)

    def tell(self) -> str:
        """Its stage and its story in one line, for errors; times are on the router's clock."""
        lines = zip(self.story[::3], self.story[1::3], self.story[2::3], strict=True)
        told = ", then ".join(f"{name}{detail and ': '}{detail} at {at:.3f} s" for at, name, detail in lines)
        return f"{self.stage.value} ({told})" if told else self.stage.value
