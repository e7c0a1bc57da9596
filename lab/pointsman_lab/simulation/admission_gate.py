"""The gate of a simulation: holds requests in front of the gateway until an admission rule of the lab lets them in. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from pointsman_lab.admission.rule import AdmissionRule, Admitted, Answer
from pointsman_lab.simulation.event_queue import EventQueue
from pointsman_lab.simulation.request import SimulatedRequest
from pointsman_router.core.placement_types import Load

# (request, now): passes an admitted request on.
LetIn = Callable[[SimulatedRequest, float], None]


class AdmissionGate:
    """All requests that wait, by session. `rules`: the rule of each pool. `instances`: the instances of each pool."""

    def __init__(
        self,
        rules: Mapping[str, AdmissionRule],
        instances: Mapping[str, Sequence[str]],
        event_queue: EventQueue,
        loads: Callable[[str, float], Mapping[str, Load]],
        let_in: LetIn,
    ) -> None:
        """`loads` returns the present loads of a pool's instances by name."""
        self._rules = rules
        self._instances = instances
        self._event_queue = event_queue
        self._loads = loads
        self._let_in = let_in
        self._waiting: dict[str, SimulatedRequest] = {}

    def begin(self) -> None:
        """Schedule the rules' ticks; to be called once. Mutates."""
        for pool, rule in self._rules.items():
            self._event_queue.schedule(rule.interval_s, partial(self._tick, pool))

    def arrive(self, running: SimulatedRequest, now: float) -> None:
        """Let a request wait until its rule admits it, which may be at once. Mutates."""
        turn = running.turn
        session, parent = turn.request.session, turn.parent if turn.names_parent else ""
        self._waiting[session] = running
        self._admit(self._rules[turn.pool].asked(session, turn.request.input_length, now, parent), now)

    def leave(self, running: SimulatedRequest) -> bool:
        """Remove a request whose client disconnects; return whether it waited here. Mutates."""
        session = running.turn.request.session
        if self._waiting.get(session) is not running:
            return False
        del self._waiting[session]
        return True

    def answered(self, running: SimulatedRequest, now: float, *, over: bool) -> None:
        """Handle the end of a request; `over`: it was the session's last one. Mutates."""
        request, rule, ok = running.turn.request, self._rules[running.turn.pool], running.record.ok
        output, cached = request.output_length if ok else 0, running.record.cached_tokens or 0
        answer = Answer(request.input_length, output, cached, ok)
        found = rule.ended(request.session, now) if over else rule.answered(request.session, answer, now)
        self._admit(found, now)

    def _tick(self, pool: str, now: float) -> None:
        rule = self._rules[pool]
        self._admit(rule.tick(self._loads(pool, now), now), now)
        self._event_queue.schedule(now + rule.interval_s, partial(self._tick, pool))

    def _admit(self, admitted: Sequence[Admitted], now: float) -> None:
        for admitted_request in admitted:
            running = self._waiting.pop(admitted_request.program)
            running.record.parked_s = now - running.record.t_send
            if admitted_request.instance:
                others = tuple(name for name in self._instances[running.turn.pool] if name != admitted_request.instance)
                running.turn = replace(running.turn, exclude=others)
            self._let_in(running, now)
