"""The requests whose spans go to a collector: begun when they come, sent part by part as they end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from services.common.tracing import Place, Span, Value, begin
from services.gateway.attempt import Attempt
from services.gateway.spans import attempt_spans, question_place, request_span, step_place

Send = Callable[[Iterable[Span]], None]


class Traced:
    """One request in its trace. What is not sampled is only sent on, for whoever comes next not to decide anew."""

    def __init__(self, place: Place, parent_id: int, send: Send) -> None:
        self._place = place
        self._parent_id = parent_id
        self._send = send
        self._received, self._understood = time.monotonic(), 0.0
        # One offset for all of its spans: a clock that is set meanwhile does not make their parts negative.
        self._offset_ns = time.time_ns() - int(self._received * 1e9)
        self._known: dict[str, Value] = {}

    def question(self, attempt_id: str) -> Place:
        """Where the router goes on from."""
        return question_place(self._place, attempt_id)

    def step(self, attempt_id: str, index: int) -> Place:
        """Where the engine that does a step goes on from."""
        return step_place(self._place, attempt_id, index)

    def understood(self, request_id: str, now: float) -> None:
        """Its prompt is tokenised."""
        self._understood = now
        self._known["pointsman.request_id"] = request_id

    def ended(self, attempt: Attempt, error: str, input_tokens: int, now: float) -> None:
        """An attempt is over."""
        if self._place.sampled:
            self._send(attempt_spans(self._place, attempt, error, input_tokens, now, self._clock))

    def answered(self, route: str, model: str, status: int) -> None:
        """It is over itself. Route and model are such as are served here, or empty."""
        if not self._place.sampled:
            return
        span = request_span(
            self._place,
            self._parent_id,
            route,
            status,
            self._received,
            self._understood,
            time.monotonic(),
            self._clock,
            **self._known,
            **{"gen_ai.request.model": model},
        )
        self._send([span])

    def _clock(self, moment: float) -> int:
        return self._offset_ns + int(moment * 1e9)


class Traces:
    """Begins traces, or goes on with clients' own (services.common.tracing.begin)."""

    def __init__(self, send: Send, share: float) -> None:
        self._send = send
        self._share = share
        self._rng = random.Random()

    def begin(self, traceparent: str) -> Traced:
        """A request came, with that header."""
        return Traced(*begin(traceparent, self._share, self._rng), self._send)
