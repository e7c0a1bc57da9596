"""Progress-TTL: a program keeps its place for a time that is worth it, then its next request may have to wait. Pure.

Source: vllm-router 0.1.17, src/program_scheduling: policy.rs, factors.rs, scheduler.rs, scheduler_admission.rs,
scheduler_fairness.rs, scheduler_lifecycle.rs and scheduler_state.rs, with their defaults and the capacity of each instance set.

A program is bound to an instance by a hash, a sub-agent by its parent's. It is active there from a request's admission on, and

    private(program) = context - prefix that it shares + 100;    used(instance) = sum over its active programs of private

where the KV in use that the engine reports each second, x programs with requests / running requests if that is above 1, replaces
the sum over programs with requests.

- After an answer it stays active for a TTL, then it is paused. The TTL d, at most 10 s and the cost C of computing its context
  again (1.85 x prefill, as decodes beside it suffer), maximises P(T < d) C - E[T; T < d] - d P(T >= d), where T, the time until
  the next request, is log-normal, fitted to the last 100 of the instance; before there are 100, d is 0. A sub-agent has none: it
  is forgotten with each answer.
- A paused program goes on if its instance has no waiting requests, fewer than 64 active programs, and

      used + private + growth x (rounds + sum over active programs of the rest of their rounds) <= capacity

  growth: mean growth of a context per request; rounds: twice the mean number of requests since a pause by TTL, at most 14. If it
  fits but for the last term, it also goes on where a larger batch gains more decode time than its prefill and the shorter rests
  of others cost. The program whose last answer is newest goes first; one that has waited for 30 to 300 s, by the work before it,
  goes on in any case once its instance has no waiting requests. After 600 s it is refused, and the router's retry waits anew.
- While used, with a mean answer for each open request, exceeds the capacity, programs are paused, at once or when their request
  ends: first those with the greatest time since their context was computed, weighted by 1 / sqrt(context / mean), at least 0.5.
- After 14 requests since its admission a program without a request is paused if the first one that waits for its instance needs
  more than programs to be paused will free. It goes on after the others.

Prefill and decode times are calibrated on the lab's modelled engine, as the source's are on its own. Left out: the refusal of the
fifth attempt, renewal of the shared prefix, prompts that become shorter, the end of a program after 1,800 s without a request,
what clients may tell with a request (priority, deadline, TTL, length of the answer), and moves to other instances (off by
default). The source predicts returns and lengths of answers, too, and by default only records them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, erf, exp, inf, log, sqrt
from statistics import fmean
from typing import NamedTuple

from pointsman_lab.admission.rule import Admitted, Answer
from pointsman_lab.engine.cost_profile import Profile
from pointsman_router.core.placement_types import Load

BUFFER_TOKENS, MOST_ACTIVE, MOST_ROUNDS, WINDOW = 100, 64, 14, 100
LONGEST_TTL_S, LEAST_TTL_S = 10.0, 0.05
# Share of the decode throughput that is left beside a prefill.
DECODES_LEFT = 0.15
# Share of the last context that must have been cached for a round to count.
CONTINUOUS_SHARE = 0.9
LEAST_WAIT_S, LONGEST_WAIT_S, REFUSED_AFTER_S = 30.0, 300.0, 600.0
ENGINE = Profile()


@dataclass(slots=True)
class _Program:
    name: str  # session id
    instance: str  # to which it is bound
    parent: str = ""  # the program that waits for it, if it is a sub-agent
    context: int = 0  # tokens of its prompts
    shared: int = 0  # tokens of its first prompt that were cached
    active: bool = False  # whether it holds a place on its instance
    open: bool = False  # whether a request of it is at an engine
    since: float = inf  # when its waiting request came; inf: none waits
    forced_at: float = inf  # when that goes on in any case
    rounds: int = 0  # continuous requests since its admission
    began: float = inf  # when the computation of its context began
    resumed_at: float = inf  # when its open request was admitted; inf: it was active before
    yielded: bool = False  # whether it was paused for others after its rounds
    since_ttl: int = 0  # continuous requests since a pause by TTL
    last_context: int = 0  # of its last answered request; 0 before it
    ended_at: float = -inf  # when that ended
    impact_s: float = 0.0  # cost of computing that again
    expires_at: float = inf  # end of its TTL
    to_be_paused: bool = False  # when its open request ends

    @property
    def private(self) -> int:
        return max(self.context - self.shared, 0) + BUFFER_TOKENS


class _Request(NamedTuple):
    """An answered request. Sizes in tokens."""

    prompt: int  # its length
    output: int  # its answer's length
    growth: int  # over the program's last prompt; 0: unknown
    since_ttl: int  # _Program.since_ttl with it
    ended_at: float  # s


@dataclass(slots=True)
class _Window:
    """What the last requests of an instance showed."""

    requests: deque[_Request] = field(default_factory=lambda: deque(maxlen=WINDOW))
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def rounds(self) -> float:
        """The rounds for which room is kept; 0 until the window is full."""
        if len(self.requests) < WINDOW:
            return 0.0
        return min(max(ceil(2.0 * fmean(request.since_ttl for request in self.requests)), 1.0), MOST_ROUNDS)

    @property
    def growth(self) -> float:
        known = [request.growth for request in self.requests if request.growth]
        return fmean(known) if known else 0.0

    @property
    def output(self) -> float:
        return fmean(request.output for request in self.requests) if self.requests else 0.0

    @property
    def per_s(self) -> float:
        """Requests per second; 0 if unknown."""
        if len(self.requests) < 2:
            return 0.0
        span = self.requests[-1].ended_at - self.requests[0].ended_at
        return (len(self.requests) - 1) / span if span > 0 else 0.0


class ProgressTtl:
    """The rule for one pool. `capacity`: tokens of KV of each instance, by name."""

    interval_s = 1.0

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self._capacity = capacity
        self._programs: dict[str, _Program] = {}
        self._windows = {name: _Window() for name in capacity}
        self._busy: set[str] = set()  # instances with waiting requests
        # Tokens in use at the last tick, less those of the programs that had requests.
        self._excess = dict.fromkeys(capacity, 0.0)

    def asked(self, program: str, tokens: int, now: float, parent: str = "") -> Sequence[Admitted]:
        """Handle a program's next request: it goes on if the program is active, or can be admitted. Mutates."""
        if (state := self._programs.get(program)) is None:
            state = self._programs[program] = _Program(program, self._bound(parent or program), parent)
        state.context = max(state.context, tokens)
        self._arrive(state, now)
        going = [Admitted(program, state.instance)] if state.active else []
        return going + self._decided(now)

    def answered(self, program: str, answer: Answer, now: float) -> Sequence[Admitted]:
        """Handle the end of a request: its TTL begins, or the program is paused. Mutates."""
        state = self._programs[program]
        window = self._windows[state.instance]
        if not state.open:
            # It left while it waited.
            state.since = inf
            return []
        state.open = False
        state.impact_s = _impact_s(max(answer.prompt - state.shared, 0))
        if answer.ok:
            before = state.last_context
            continuous = not before or answer.cached >= CONTINUOUS_SHARE * before
            if not before:
                state.shared = min(answer.cached, answer.prompt)
            if state.resumed_at < inf and not (before and continuous):
                state.began = state.resumed_at
            state.rounds += continuous
            state.since_ttl += continuous
            growth = answer.prompt - before if 0 < answer.prompt - before < before else 0
            window.requests.append(_Request(answer.prompt, answer.output, growth, state.since_ttl, now))
            state.context = max(state.context, answer.prompt)
            state.last_context, state.ended_at = answer.prompt, now
        if state.parent:
            self._programs[program] = _Program(program, state.instance, state.parent)
        elif state.to_be_paused or not answer.ok:
            self._pause(state)
        else:
            state.expires_at = now + fitted_ttl_s(window.intervals, state.impact_s)
            self._yield(state, now)
        return self._decided(now)

    def ended(self, program: str, now: float) -> Sequence[Admitted]:
        """Forget a program, and let others take its place. Mutates."""
        self._programs.pop(program, None)
        return self._decided(now)

    def tick(self, loads: Mapping[str, Load], now: float) -> Sequence[Admitted]:
        """Read which instances have waiting requests, and their used KV, and decide anew. Mutates."""
        self._busy = {name for name, load in loads.items() if load.waiting}
        for name, load in loads.items():
            counted = [state.private for state in self._active(name) if state.open]
            running, used = load.running or 0, (load.kv_usage or 0.0) * self._capacity[name]
            self._excess[name] = used * max(len(counted) / running, 1.0) - sum(counted) if running else 0.0
        return self._decided(now)

    def _decided(self, now: float) -> list[Admitted]:
        """End TTLs and waits, pause what does not fit, and admit what does."""
        for state in self._programs.values():
            if state.since + REFUSED_AFTER_S <= now:
                self._arrive(state, now)
            if state.active and not state.open and state.expires_at <= now:
                self._pause(state)
                state.since_ttl = 0
        for instance in self._capacity:
            self._pause_until_it_fits(instance, now)
        return self._admitted(now)

    def _arrive(self, state: _Program, now: float) -> None:
        """Let a program's request go on or wait, also when the router retries one that it has refused."""
        if state.last_context:
            self._windows[state.instance].intervals.append(now - state.ended_at)
        if state.active:
            state.open, state.expires_at, state.resumed_at = True, inf, inf
        else:
            state.since, state.forced_at = now, inf
            state.forced_at = now + self._wait_s(state)

    def _admitted(self, now: float) -> list[Admitted]:
        found = []
        for instance in self._capacity:
            while (
                state := next((of for of in self._in_order(instance, now) if self._fits(of, now)), None)
            ) is not None:
                state.active = state.open = True
                state.since = state.forced_at = state.expires_at = inf
                state.rounds, state.resumed_at, state.began = 0, now, min(state.began, now)
                state.to_be_paused = state.yielded = False
                found.append(Admitted(state.name, instance))
        return found

    def _in_order(self, instance: str, now: float) -> list[_Program]:
        waiting = self._waiting(instance)
        return sorted(waiting, key=lambda of: (of.forced_at > now, of.yielded, -of.ended_at, of.since, of.name))

    def _fits(self, state: _Program, now: float) -> bool:
        if state.instance in self._busy:
            return False
        if state.forced_at <= now:
            return True
        active = list(self._active(state.instance))
        if len(active) >= MOST_ACTIVE:
            return False
        window, capacity = self._windows[state.instance], self._capacity[state.instance]
        left = capacity - self._used(state.instance) - state.private
        rests = [(rest, other.impact_s) for other in active if (rest := window.rounds - other.rounds) > 0]
        reserve = window.growth * (window.rounds + sum(rest for rest, _ in rests))
        return left >= reserve or (left >= 0 and self._gains(state, active, rests, left))

    def _gains(
        self, state: _Program, active: Sequence[_Program], rests: Sequence[tuple[float, float]], left: float
    ) -> bool:
        """Return whether one more in the batch gains more than it costs, where `left` tokens remain with it."""
        window = self._windows[state.instance]
        running = [other for other in active if other.open]
        if len(window.requests) < WINDOW or not running:
            return False
        tokens = sum(other.context for other in running)
        before = len(running) / ENGINE.decode_step_s(len(running), tokens)
        after = (len(running) + 1) / ENGINE.decode_step_s(len(running) + 1, tokens + state.context)
        gain_s = len(running) * window.output / before * max(after / before - 1.0, 0.0)
        cost_s = _impact_s(max(state.context - state.shared, 0))
        if rests and window.growth > 0:
            total = sum(rest for rest, _ in rests)
            kept = min(total, (left + state.private) / window.growth)
            then = min(total, max(left - window.growth * window.rounds, 0.0) / window.growth)
            if kept > 0 >= then:
                return False
            if then > 0:
                cost_s += (kept - then) / then * fmean(impact_s for _, impact_s in rests)
        return gain_s >= cost_s

    def _pause_until_it_fits(self, instance: str, now: float) -> None:
        window, capacity = self._windows[instance], self._capacity[instance]
        active = list(self._active(instance))
        output = ceil(window.output)
        excess = self._used(instance) + output * sum(state.open for state in active) - capacity
        # What is to be paused is not counted again: no other one is paused in its place.
        excess -= sum(state.private + output for state in active if state.to_be_paused)
        if excess <= 0:
            return
        mean = fmean(request.prompt for request in window.requests) if window.requests else 1.0

        def score(state: _Program) -> float:
            return (now - state.began) * max(sqrt(max(mean, 1.0) / max(state.context, 1)), 0.5)

        others = (state for state in active if not state.to_be_paused)
        for state in sorted(others, key=lambda of: (-score(of), -of.private, of.name)):
            if excess <= 0:
                return
            excess -= state.private + output * state.open
            if state.open:
                state.to_be_paused = True
            else:
                self._pause(state)

    def _yield(self, state: _Program, now: float) -> None:
        """Pause a program after its rounds, if the first one that waits needs more than will be free."""
        order = self._in_order(state.instance, now)
        if state.rounds >= MOST_ROUNDS and order:
            freed = sum(other.private for other in self._active(state.instance) if other.to_be_paused)
            if order[0].private > freed:
                self._pause(state)
                state.yielded = True

    def _pause(self, state: _Program) -> None:
        state.active = state.to_be_paused = False
        state.rounds, state.expires_at = 0, inf

    def _wait_s(self, state: _Program) -> float:
        """Return after what time a waiting request goes on in any case: three times that of the work before it."""
        window = self._windows[state.instance]
        if not window.rounds or not window.per_s:
            return LONGEST_WAIT_S
        rests = sum(max(window.rounds - other.rounds, float(other.open)) for other in self._active(state.instance))
        order = self._in_order(state.instance, state.since)
        ahead = order.index(state) * window.rounds
        return min(max(3.0 * (rests + ahead) / window.per_s, LEAST_WAIT_S), LONGEST_WAIT_S)

    def _used(self, instance: str) -> float:
        return max(sum(state.private for state in self._active(instance)) + self._excess[instance], 0.0)

    def _active(self, instance: str) -> Iterator[_Program]:
        return (state for state in self._programs.values() if state.active and state.instance == instance)

    def _waiting(self, instance: str) -> Iterator[_Program]:
        return (state for state in self._programs.values() if state.since < inf and state.instance == instance)

    def _bound(self, program: str) -> str:
        names = sorted(self._capacity)
        return names[int.from_bytes(hashlib.sha256(program.encode()).digest()[:8]) % len(names)]


def fitted_ttl_s(intervals: Sequence[float], impact_s: float) -> float:
    """Return the time for which a program is kept after an answer, if computing its context again costs `impact_s`."""
    known = [interval for interval in intervals if interval > 0]
    longest = min(LONGEST_TTL_S, impact_s)
    if len(intervals) < WINDOW or not known or longest <= 0:
        return 0.0
    logs = [log(interval) for interval in known]
    mean = fmean(logs)
    sigma = max(sqrt(fmean((value - mean) ** 2 for value in logs)), 1e-6)
    whole = exp(mean + sigma * sigma / 2.0)

    def utility(ttl_s: float) -> float:
        returned = _normal((log(ttl_s) - mean) / sigma)
        early_s = whole * _normal((log(ttl_s) - mean - sigma * sigma) / sigma)
        return impact_s * returned - early_s - ttl_s * (1.0 - returned)

    least = min(LEAST_TTL_S, longest)
    # The longest of those that are worth the same.
    best = max((longest * (least / longest) ** (step / 31) for step in range(32)), key=utility)
    return best if utility(best) >= 0 else 0.0


def _impact_s(tokens: int) -> float:
    return (ENGINE.step_s + ENGINE.chunk_s(tokens, 0)) * (2.0 - DECODES_LEFT) if tokens else 0.0


def _normal(value: float) -> float:
    return 0.5 * (1.0 + erf(value / sqrt(2.0)))
