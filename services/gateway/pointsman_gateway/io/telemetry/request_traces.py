"""Starts the traces of requests."""

from __future__ import annotations

import random
import time

from pointsman_common.core.tracing import start_trace
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
