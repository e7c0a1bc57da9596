"""The trace record of one request: its span context, its time and its attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pointsman_common.core.tracing import Span, SpanContext, Value

Send = Callable[[Iterable[Span]], None]


class RequestTrace:
    """One request in its trace. The context of a request that is not sampled is only forwarded, so that later services do not
    make the sampling decision again.

    `received_at`: when the whole body had come, monotonic s; `offset_ns` converts such times to Unix ns. All spans of the request
    use the same offset, so that a change of the system clock does not make durations negative. `known` are attributes of the
    request's own span, `asked` those of each step that answers the request.
    """

    def __init__(self, context: SpanContext, parent_id: int, send: Send, received_at: float, offset_ns: int) -> None:
        self.context = context
        self.parent_id = parent_id
        self.send = send
        self.received_at, self.tokenised = received_at, 0.0
        self.known: dict[str, Value] = {}
        self.asked: Mapping[str, Value] = {}
        self._offset_ns = offset_ns

    def placement_context(self, attempt_id: str) -> SpanContext:
        """Return the span context that the router continues for an attempt."""
        return self.context.child(f"{attempt_id} place")

    def step_context(self, attempt_id: str, index: int) -> SpanContext:
        """Return the span context that the engine of step `index` continues."""
        return self.context.child(f"{attempt_id} {index}")

    def prepared(self, request_id: str, asked: Mapping[str, Value], now: float) -> None:
        """Record that the prompt is tokenised. `asked`: attributes of the request's parameters. Mutates."""
        self.tokenised, self.asked = now, asked
        self.known["pointsman.request_id"] = request_id

    def clock(self, moment: float) -> int:
        """Convert a time on the monotonic clock to Unix ns."""
        return self._offset_ns + int(moment * 1e9)
