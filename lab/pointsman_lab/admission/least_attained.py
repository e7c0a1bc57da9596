"""llm-d's flow control with its fairness among programs: the least attained service goes first. Pure.

Source: llm-d-router at ebab6879 (August 2026): program-aware-fairness (strategy `las`) and the utilization-detector, with
their defaults. Flow control is off by default.

    saturation = mean over the instances of max(waiting requests / 5, KV usage / 0.8)

While it is 1 or more, requests wait, each in the queue of its program. The next one is the first of the program with the highest

    0.8 x (1 - service) + 0.2 x wait        both scaled to 0 to 1 between the least and the greatest of the programs that wait

service: tokens of prompts and twice those of answers that the program has had, halved every 60 s. wait: age of its first request.
A program is what the client names: here a session with all its sub-agents that name it.

Other than in llm-d, a request that has waited for 60 s (its default) is not refused, but waits on, since rules of the lab do not
refuse; loads are read every 0.2 s in place of 0.05 s; and every program is forgotten at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp2, inf
from statistics import fmean

from pointsman_lab.admission.rule import Admitted, Answer
from pointsman_router.core.placement_types import Load

WAITING, KV_USAGE = 5, 0.8
SERVICE_WEIGHT, WAIT_WEIGHT, OUTPUT_WEIGHT, HALF_LIFE_S = 0.8, 0.2, 2.0, 60.0


@dataclass(slots=True)
class _Program:
    service: float = 0.0  # as of `at`, tokens
    at: float = 0.0
    waiting: deque[tuple[float, str]] = field(default_factory=deque)  # (when it came, session), the first one first

    def add(self, tokens: float, now: float) -> None:
        self.service, self.at = self.service_at(now) + tokens, now

    def service_at(self, now: float) -> float:
        return self.service * exp2((self.at - now) / HALF_LIFE_S)


class LeastAttained:
    """The rule for one pool; it chooses no instances."""

    interval_s = 0.2

    def __init__(self) -> None:
        self._saturated = False
        self._programs: dict[str, _Program] = {}
        self._root: dict[str, str] = {}  # session -> its program

    def asked(self, program: str, tokens: int, now: float, parent: str = "") -> Sequence[Admitted]:
        """Handle a session's next request: it goes on while the pool is not saturated. Mutates."""
        root = self._root.setdefault(program, self._root.get(parent, parent) if parent else program)
        self._programs.setdefault(root, _Program()).waiting.append((now, program))
        return self._dispatched(now)

    def answered(self, program: str, answer: Answer, now: float) -> Sequence[Admitted]:
        """Count what an answer took. Mutates."""
        self._forget_request(program)
        self._programs[self._root[program]].add(answer.prompt + OUTPUT_WEIGHT * answer.output, now)
        return []

    def ended(self, program: str, now: float) -> Sequence[Admitted]:
        """Forget a session, and its program with the last one. Mutates."""
        self._forget_request(program)
        root = self._root.pop(program, program)
        if root not in self._root.values():
            self._programs.pop(root, None)
        return []

    def tick(self, loads: Mapping[str, Load], now: float) -> Sequence[Admitted]:
        """Read the loads, and let requests go on while the pool is not saturated. Mutates."""
        used = [max((load.waiting or 0) / WAITING, (load.kv_usage or 0.0) / KV_USAGE) for load in loads.values()]
        self._saturated = bool(used) and fmean(used) >= 1.0
        return self._dispatched(now)

    def _dispatched(self, now: float) -> list[Admitted]:
        admitted = []
        while not self._saturated and (first := self._first(now)) is not None:
            admitted.append(Admitted(first.waiting.popleft()[1]))
        return admitted

    def _first(self, now: float) -> _Program | None:
        waiting = [program for program in self._programs.values() if program.waiting]
        services = [program.service_at(now) for program in waiting]
        waits = [now - program.waiting[0][0] for program in waiting]
        best, highest = None, -inf
        for program, service, wait in zip(waiting, _scaled(services), _scaled(waits), strict=True):
            score = SERVICE_WEIGHT * (1.0 - service) + WAIT_WEIGHT * wait
            if score > highest:
                best, highest = program, score
        return best

    def _forget_request(self, session: str) -> None:
        if (program := self._programs.get(self._root.get(session, ""))) is not None:
            program.waiting = deque(entry for entry in program.waiting if entry[1] != session)


def _scaled(values: Sequence[float]) -> list[float]:
    """Return the values scaled to 0 to 1 between the least and the greatest; 0.5 if all are equal."""
    if not values or max(values) == min(values):
        return [0.5] * len(values)
    least, span = min(values), max(values) - min(values)
    return [(value - least) / span for value in values]
