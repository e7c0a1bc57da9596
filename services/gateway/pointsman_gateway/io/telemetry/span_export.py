"""Starts the traces of requests, and sends the spans of each part when it ends."""

from __future__ import annotations

import random
import time

from pointsman_common.core.tracing import start_trace
from pointsman_gateway.core.request.attempt import Attempt
from pointsman_gateway.core.request.request_spans import attempt_spans, request_span
from pointsman_gateway.core.request_trace import RequestTrace, Send


class RequestTraces:
    """Starts traces, or continues those of clients (pointsman_common.core.tracing.start_trace)."""

    def __init__(self, send: Send, sample_ratio: float) -> None:
        self._send = send
        self._sample_ratio = sample_ratio
        self._rng = random.Random()

    def start(self, traceparent: str) -> RequestTrace:
        """Start the trace of a request that has arrived with the header `traceparent`."""
        context, parent_id = start_trace(traceparent, self._sample_ratio, self._rng)
        now = time.monotonic()
        return RequestTrace(context, parent_id, self._send, now, time.time_ns() - int(now * 1e9))


def attempt_ended(trace: RequestTrace, attempt: Attempt, error: str, input_tokens: int, now: float) -> None:
    """Send the spans of an attempt that has ended, if the request is sampled."""
    if trace.sampled:
        trace.send(attempt_spans(trace.context, attempt, trace.asked, error, input_tokens, now, trace.clock))


def answered(trace: RequestTrace, route: str, model: str, status: int) -> None:
    """Send the span of a request that has ended, if it is sampled. `route` and `model` are those of this gateway, or empty."""
    if not trace.sampled:
        return
    span = request_span(
        trace.context,
        trace.parent_id,
        route,
        status,
        trace.received_at,
        trace.tokenised,
        time.monotonic(),
        trace.clock,
        **trace.known,
        **{"gen_ai.request.model": model},
    )
    trace.send([span])
