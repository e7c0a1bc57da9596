"""What an attempt leaves: its moments, steps and usage, for the router, the metrics and the breakdown log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pointsman.router.v1 import placement_pb2
from services.gateway.breakdown import Breakdown
from services.gateway.dialects.endings import Usage
from services.gateway.job import Job
from services.gateway.moves import Finished, StepGiven


@dataclass
class StepRun:
    """One step as it went. Moments are monotonic seconds; `ended` is 0 for one that the attempt's end ended."""

    step: StepGiven
    began: float
    ended: float = 0.0
    error: str = ""


@dataclass
class Attempt:
    """One attempt as it went. Moments are monotonic seconds, 0 for never."""

    id: str = ""
    asked: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    ahead: float = 0.0  # when the next step was sent, before it was given
    runs: list[StepRun] = field(default_factory=list)
    fallback: str = ""
    usage: Usage = field(default_factory=Usage)

    def ask(self, attempt_id: str, now: float) -> None:
        """Note that it asks where to go. Mutates."""
        self.id, self.asked = attempt_id, self.asked or now

    def begin(self, step: StepGiven, now: float) -> None:
        """Note a step that is being done. Mutates."""
        # Pulled, and now served: it is one step.
        if not self.runs or self.runs[-1].step.index != step.index:
            self.runs.append(StepRun(step, self.ahead or now))
            self.ahead = 0.0

    def next(self, error: str, now: float) -> None:
        """Note that the newest step is over, and how it failed. Mutates."""
        self.fallback = error or self.fallback
        self.runs[-1].ended, self.runs[-1].error = now, error

    @property
    def placed(self) -> float:
        """When its first step was begun."""
        return self.runs[0].began if self.runs else 0.0

    @property
    def steps(self) -> list[StepGiven]:
        """Its steps, in their order."""
        return [run.step for run in self.runs]

    @property
    def instance_id(self) -> str:
        """Where its last step went; empty before the first."""
        return self.runs[-1].step.target.instance_id if self.runs else ""

    def finished(self, effect: Finished, job: Job, status: int, now: float) -> placement_pb2.Finished:
        """Its end, for the router."""
        finished = placement_pb2.Finished(
            request_id=effect.attempt_id,
            outcome=placement_pb2.Outcome.ValueType(effect.outcome.value),
            prompt_tokens=self.usage.prompt,
            cached_tokens=self.usage.cached,
            output_tokens=self.usage.output,
            error=effect.error,
            http_status=status,
        )
        finished.timings.placed_ms = _ms(self.placed, job.received)
        finished.timings.sent_ms = _ms(self.sent, job.received)
        finished.timings.first_token_ms = _ms(self.first, job.received)
        finished.timings.done_ms = _ms(now, job.received)
        return finished

    def broken_down(
        self, effect: Finished, job: Job, status: int, now: float, unix: Callable[[float], float | None]
    ) -> Breakdown:
        """Its line of the breakdown log; `unix` turns moments into unix s."""
        last = self.steps[-1] if self.steps else None
        prefills = [run for run in self.runs if run.step.prefill_tokens]
        return Breakdown(
            request_id=effect.attempt_id,
            decision_id=next((step.decision_id for step in self.steps if step.decision_id), ""),
            model=job.state.pool.model,
            stream=job.call.stream,
            outcome=effect.outcome.name,
            status=status,
            instances=[step.target.instance_id for step in self.steps],
            fallback=self.fallback,
            error=effect.error,
            degraded=last is not None and last.degraded,
            input_tokens=job.placement.input_tokens,
            predicted_cached_tokens=last.cached_tokens if last is not None else 0,
            prompt_tokens=self.usage.prompt,
            cached_tokens=self.usage.cached,
            output_tokens=self.usage.output,
            t_recv=unix(job.received),
            t_placed=unix(self.placed),
            t_prefill_sent=unix(prefills[0].began) if prefills else None,
            t_prefill_done=unix(prefills[-1].ended) if prefills else None,
            t_sent=unix(self.sent),
            t_first_token=unix(self.first),
            t_done=unix(now),
        )


def _ms(at: float, since: float) -> float:
    return max(0.0, (at - since) * 1e3) if at else 0.0
