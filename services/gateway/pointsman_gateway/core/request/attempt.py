"""The record of one attempt to answer a request: its times, its steps and its token counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from pointsman_gateway.core.request.request_events import StepAssigned
from pointsman_gateway.core.streaming.parse_stream_end import Usage


@dataclass
class StepRun:
    """The record of one step. Times are monotonic seconds. `ended_at` is 0 while the step runs, and if it ended with the
    attempt."""

    step: StepAssigned
    began_at: float
    ended_at: float = 0.0
    error: str = ""


@dataclass
class Attempt:
    """The record of one attempt. Times are monotonic seconds, 0 for events that did not happen. `continues`: number of tokens of
    the answer that earlier attempts have sent, 0 for an attempt that begins it."""

    id: str = ""  # as the router knows it; empty until a placement is requested
    asked_at: float = 0.0  # when the placement was requested
    sent_at: float = 0.0  # when the request of the last SERVE was sent
    first_byte_at: float = 0.0  # of an answer that is not streamed: when all of it had arrived
    early_sent_at: float = 0.0  # when the next step was sent before the router assigned it
    step_runs: list[StepRun] = field(default_factory=list)  # in order; a pull and its SERVE are one
    fallback: str = ""  # error of the last step that failed; empty: none did
    usage: Usage = field(default_factory=Usage)  # as the engine counted; of a continued answer, of the whole
    own_cached: int = 0  # of the usage's cached tokens, those that earlier steps of the request have computed
    continues: int = 0

    def begin_placement(self, attempt_id: str, now: float) -> None:
        """Record the id and that a placement is requested. Mutates."""
        self.id, self.asked_at = attempt_id, self.asked_at or now

    def begin_step(self, step: StepAssigned, now: float) -> None:
        """Record the start of a step. Mutates."""
        # A pull and the SERVE after it are one step, with one index.
        if not self.step_runs or self.step_runs[-1].step.index != step.index:
            self.step_runs.append(StepRun(step, self.early_sent_at or now))
            self.early_sent_at = 0.0

    def end_step(self, error: str, now: float) -> None:
        """Record the end of the newest step, and how it failed ("": it did not). Mutates."""
        self.fallback = error or self.fallback
        self.step_runs[-1].ended_at, self.step_runs[-1].error = now, error

    @property
    def cache_hits(self) -> int:
        """Number of prompt tokens that were cached without the request's own steps; 0 if the engine did not report it."""
        return (self.usage.cached or 0) - self.own_cached

    @property
    def placed_at(self) -> float:
        """Start time of the first step; 0 before it."""
        return self.step_runs[0].began_at if self.step_runs else 0.0

    @property
    def steps(self) -> list[StepAssigned]:
        """The steps, in order."""
        return [run.step for run in self.step_runs]

    @property
    def instance_id(self) -> str:
        """Id of the last step's instance; empty before the first step."""
        return self.step_runs[-1].step.target.instance_id if self.step_runs else ""
