"""The record of one attempt to answer a request: when it came to what, its steps, its token counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from pointsman.gateway.core.request.request_events import StepAssigned
from pointsman.gateway.core.streaming.usage_and_end import Usage


@dataclass
class StepRun:
    """One step as it went. Moments are monotonic seconds; `ended` is 0 for one that the attempt's end ended."""

    step: StepAssigned
    began_at: float
    ended_at: float = 0.0
    error: str = ""


@dataclass
class Attempt:
    """One attempt as it went. Moments are monotonic seconds, 0 for never."""

    id: str = ""
    asked_at: float = 0.0
    sent_at: float = 0.0
    first_byte_at: float = 0.0
    early_sent_at: float = 0.0  # when the next step was sent, before it was given
    step_runs: list[StepRun] = field(default_factory=list)
    fallback: str = ""
    usage: Usage = field(default_factory=Usage)

    def begin_placement(self, attempt_id: str, now: float) -> None:
        """Note that it asks where to go. Mutates."""
        self.id, self.asked_at = attempt_id, self.asked_at or now

    def begin_step(self, step: StepAssigned, now: float) -> None:
        """Note a step that is being done. Mutates."""
        # Pulled, and now served: it is one step.
        if not self.step_runs or self.step_runs[-1].step.index != step.index:
            self.step_runs.append(StepRun(step, self.early_sent_at or now))
            self.early_sent_at = 0.0

    def end_step(self, error: str, now: float) -> None:
        """Note that the newest step is over, and how it failed. Mutates."""
        self.fallback = error or self.fallback
        self.step_runs[-1].ended_at, self.step_runs[-1].error = now, error

    @property
    def placed_at(self) -> float:
        """When its first step was begun."""
        return self.step_runs[0].began_at if self.step_runs else 0.0

    @property
    def steps(self) -> list[StepAssigned]:
        """Its steps, in their order."""
        return [run.step for run in self.step_runs]

    @property
    def instance_id(self) -> str:
        """Where its last step went; empty before the first."""
        return self.step_runs[-1].step.target.instance_id if self.step_runs else ""
