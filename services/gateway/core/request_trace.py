"""The record of one request in its trace: its place there, when it came, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pointsman.common.core.tracing import Span, SpanContext, Value

Send = Callable[[Iterable[Span]], None]


def placement_context(request: SpanContext, attempt_id: str) -> SpanContext:
    """Where the router goes on from."""
    return request.child(f"{attempt_id} place")


def step_context(request: SpanContext, attempt_id: str, index: int) -> SpanContext:
    """Where the engine that does a step goes on from."""
    return request.child(f"{attempt_id} {index}")


class RequestTrace:
    """One request in its trace. What is not sampled is only sent on, for whoever comes next not to decide anew.

    `received_at` is monotonic seconds; `offset_ns` makes such moments unix ns. It is one for all spans of the request: a clock
    that is set meanwhile does not make their parts negative. `known` are attributes of the request's own span, `asked` those of
    each step that answers it.
    """

    def __init__(self, context: SpanContext, parent_id: int, send: Send, received_at: float, offset_ns: int) -> None:
        self.context = context
        self.parent_id = parent_id
        self.send = send
        self.received_at, self.tokenised = received_at, 0.0
        self.known: dict[str, Value] = {}
        self.asked: Mapping[str, Value] = {}
        self._offset_ns = offset_ns

    @property
    def sampled(self) -> bool:
        """Whether its spans are sent."""
        return self.context.sampled

    def placement_context(self, attempt_id: str) -> SpanContext:
        """Where the router goes on from."""
        return placement_context(self.context, attempt_id)

    def step_context(self, attempt_id: str, index: int) -> SpanContext:
        """Where the engine that does a step goes on from."""
        return step_context(self.context, attempt_id, index)

    def prepared(self, request_id: str, asked: Mapping[str, Value], now: float) -> None:
        """Its prompt is tokenised; `asked`: attributes of what the client asks for. Mutates."""
        self.tokenised, self.asked = now, asked
        self.known["pointsman.request_id"] = request_id

    def clock(self, moment: float) -> int:
        """A moment on the monotonic clock as unix ns."""
        return self._offset_ns + int(moment * 1e9)
