"""ThunderAgent's rule: programs are paused and resumed so that those on an instance fit its KV cache. Pure.

Source: ThunderAgent (Kang et al., arXiv 2602.13692) as its authors released it: github.com/ThunderAgent-org/ThunderAgent,
a7eef77a, ThunderAgent/scheduler/router.py and backend/state.py, with the defaults of its configuration (RELEASED).

    used(instance) = sum over its programs of (tokens + 100); those that are to be paused count

- A new program goes to the instance with the fewest tokens among those where used + tokens + 100 <= KV capacity, if nothing
  waits; otherwise it waits. A program stays on its instance until it is paused.
- Every 5 s programs are resumed: those that wait with a request first, then new ones, then those without a request, in each group
  the smallest first (by what they had when they were paused), as many as fit the sum of what remains below `resume_to` x
  capacity; the chosen ones are placed largest first, each on the instance with the most room (best fit decreasing).
- Then the programs of an instance with used > `pause_above` x capacity are paused: first those in a tool call, the smallest
  first, until used <= `pause_to` x capacity. If that does not suffice, all that have a request open are paused when it ends.
- A request that has waited for 1,800 s goes on in any case.

In 1,000 random histories of 120 events (asked, answered, ended, tick) of eight programs on one to three instances the authors'
program and this rule let the same requests go on, to the same instances.

NVIDIA Dynamo ships the rule as a built-in plug-in of its frontend (off unless it is configured), with other limits (DYNAMO) and
the order of what programs have now, and forgets a program `keep_s` after its last answer: ai-dynamo/dynamo,
lib/router-plugins/builtin/src/thunderagent, scheduler.rs at 227ce2e4, config.rs at 8c8d7353 (September 2026). This is a reading.

Left out: the estimate of tokens from characters (prompts are known in tokens here), tokens of a system prompt that programs share
(`shared_tokens`; `shared_prefix_budget`, off by default), the decay of the tokens of programs in a tool call and their weight
(off and 1 by default; Dynamo uses the decay to choose the instance of a request that has waited for 1,800 s), the preparation of
tool environments, and migration of KV. A program's end is known here at once, as if its client always told it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pointsman_lab.admission.rule import Admitted, Answer
from pointsman_router.core.placement_types import Load

# Tokens that are reserved for each program's answers.
BUFFER_TOKENS = 100
LONGEST_WAIT_S = 1_800.0


class Limits(NamedTuple):
    """Shares of an instance's KV capacity, a time in s, and an order."""

    pause_above: float  # used beyond which its programs are paused
    pause_to: float  # to which they are paused
    resume_to: float  # to which paused ones are resumed
    keep_s: float  # after which a program without a request is forgotten
    as_paused: bool  # whether the smallest one to resume is that with the fewest tokens when it was paused, or now


RELEASED = Limits(1.0, 1.0, 1.0, inf, as_paused=True)
DYNAMO = Limits(0.95, 0.8, 0.85, 1_800.0, as_paused=False)


@dataclass(slots=True)
class _Program:
    name: str  # session id
    tokens: int = 0  # of the newest request's prompt; from its end on, also of its answer
    steps: int = 0  # number of requests so far, one that waits included
    # Whether it has a request open or waiting; otherwise it is in a tool call.
    reasoning: bool = True
    # Where it is; empty while it is paused or new.
    instance: str = ""
    # When the request that waits came; None if none waits.
    since: float | None = None
    to_be_paused: bool = False  # when its open request ends
    paused_tokens: int = 0  # `tokens` when it was paused, or came and had to wait
    idle_since: float = inf  # when its last request ended; inf while it has one

    @property
    def required(self) -> int:
        return self.tokens + BUFFER_TOKENS

    @property
    def group(self) -> int:
        """Order of resumption: with a request, new, without a request."""
        return 1 if self.steps == 1 else 0 if self.reasoning else 2


class ThunderAgent:
    """The rule for one pool. `capacity`: tokens of KV of each instance, by name."""

    interval_s = 5.0

    def __init__(self, capacity: Mapping[str, int], limits: Limits = RELEASED) -> None:
        self._capacity = capacity
        self._limits = limits
        self._programs: dict[str, _Program] = {}
        # In the order in which they were paused or came.
        self._paused: dict[str, _Program] = {}

    def asked(self, program: str, tokens: int, now: float, parent: str = "") -> Sequence[Admitted]:
        """Handle a program's next request: it goes on unless the program is paused, or new and without room. Mutates."""
        state = self._programs.setdefault(program, _Program(program))
        state.steps += 1
        state.tokens = tokens
        state.reasoning, state.idle_since = True, inf
        if state.instance:
            return [Admitted(program, state.instance)]
        if state.steps == 1 and not self._paused and (instance := self._room_for(state)):
            state.instance = instance
            return [Admitted(program, instance)]
        state.since = now
        if program not in self._paused:
            self._wait(state)
        return []

    def answered(self, program: str, answer: Answer, now: float) -> Sequence[Admitted]:
        """Handle the end of a request: the program is in a tool call now, or paused if it was to be. Mutates."""
        state = self._programs[program]
        state.reasoning, state.since, state.tokens, state.idle_since = False, None, answer.tokens, now
        if state.to_be_paused:
            self._pause(state)
        return []

    def ended(self, program: str, now: float) -> Sequence[Admitted]:
        """Forget a program. What waits is resumed at the next tick. Mutates."""
        self._programs.pop(program, None)
        self._paused.pop(program, None)
        return []

    def tick(self, loads: Mapping[str, Load], now: float) -> Sequence[Admitted]:
        """Forget what is idle for too long, resume what fits, then pause what does not. Mutates."""
        for program in [of for of in self._programs.values() if now - of.idle_since >= self._limits.keep_s]:
            self.ended(program.name, now)
        found = list(self._resumed())
        overdue = [
            program
            for program in self._paused.values()
            if program.since is not None and now - program.since >= LONGEST_WAIT_S
        ]
        found += [self._resume(program, max(self._capacity, key=self._remaining)) for program in overdue]
        for instance in self._capacity:
            self._pause_until_it_fits(instance)
        return [admitted for admitted in found if admitted.program]

    def _used(self, instance: str) -> int:
        return sum(program.required for program in self._on(instance))

    def _remaining(self, instance: str, share: float = 1.0) -> float:
        return share * self._capacity[instance] - self._used(instance)

    def _on(self, instance: str) -> Iterator[_Program]:
        return (program for program in self._programs.values() if program.instance == instance)

    def _room_for(self, program: _Program) -> str:
        """Return the instance with the fewest tokens among those that have room; empty if none has."""
        free = [name for name in self._capacity if self._remaining(name) >= program.required]
        return min(free, key=lambda name: sum(program.tokens for program in self._on(name)), default="")

    def _resumed(self) -> Iterator[Admitted]:
        share = self._limits.resume_to
        remaining = {name: left for name in self._capacity if (left := self._remaining(name, share)) > BUFFER_TOKENS}
        total, chosen = sum(remaining.values()), []
        for program in sorted(self._paused.values(), key=self._turn):
            if program.required <= total:
                chosen.append(program)
                total -= program.required
        for program in sorted(chosen, key=lambda program: -program.tokens):
            largest = max(remaining, key=remaining.__getitem__, default="")
            if largest and program.required <= remaining[largest]:
                remaining[largest] -= program.required
                yield self._resume(program, largest)

    def _turn(self, program: _Program) -> tuple[int, int]:
        return program.group, program.paused_tokens if self._limits.as_paused else program.tokens

    def _resume(self, program: _Program, instance: str) -> Admitted:
        """Return what goes on: nothing, with an empty name, if the program has no request."""
        del self._paused[program.name]
        program.instance = instance
        waited, program.since = program.since is not None, None
        return Admitted(program.name if waited else "", instance)

    def _pause(self, program: _Program) -> None:
        program.instance, program.to_be_paused = "", False
        self._wait(program)

    def _wait(self, program: _Program) -> None:
        program.paused_tokens = program.tokens
        self._paused[program.name] = program

    def _pause_until_it_fits(self, instance: str) -> None:
        if self._remaining(instance, self._limits.pause_above) >= 0:
            return
        here = sorted(self._on(instance), key=lambda program: program.tokens)
        for program in here:
            if self._remaining(instance, self._limits.pause_to) >= 0:
                return
            if not program.reasoning:
                self._pause(program)
        if self._remaining(instance, self._limits.pause_to) < 0:
            for program in here:
                program.to_be_paused = program.reasoning
