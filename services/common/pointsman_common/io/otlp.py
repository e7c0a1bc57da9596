"""Export of spans to a collector over OTLP/gRPC. Imports the SDK, so import this module only if an endpoint is set.

The standard variables OTEL_BSP_*, OTEL_EXPORTER_OTLP_* and OTEL_RESOURCE_ATTRIBUTES set batches, their sizes and delays, headers
and certificates. Sending does not wait for the collector: spans that do not fit into the queue are dropped and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext as OtelContext
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace import Status, StatusCode, TraceFlags

from pointsman_common.core.tracing import Span, SpanKind

log = structlog.get_logger()

# Maximum time to send the queued spans when the process ends, s.
FLUSH_S = 3.0
_KINDS = {SpanKind.SERVER: OtelKind.SERVER, SpanKind.CLIENT: OtelKind.CLIENT}


class Tracer:
    """Sends the spans of one process. `service` and `instance` identify the process in the trace viewer. Must be closed."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        self._resource = Resource.create({"service.name": f"pointsman-{service}", "service.instance.id": instance})
        self._exporter = OTLPSpanExporter(endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        _tell_in_our_log()

    def send(self, spans: Iterable[Span]) -> None:
        """Queue finished spans. Spans of a trace that is not sampled are dropped."""
        for span in spans:
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    _context(span.context.trace_id, span.context.span_id, span.context.sampled),
                    _context(span.context.trace_id, span.parent_id, span.context.sampled) if span.parent_id else None,
                    self._resource,
                    span.attributes,
                    [Event(event.name, timestamp=event.at_ns) for event in span.events],
                    kind=_KINDS[span.kind],
                    status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                    start_time=span.start_ns,
                    end_time=span.end_ns,
                )
            )

    async def close(self) -> None:
        """Send the queued spans, for FLUSH_S at most."""
        flushing = asyncio.ensure_future(asyncio.to_thread(self._processor.shutdown))
        await asyncio.wait({flushing}, timeout=FLUSH_S)
        if not flushing.done():
            # Ends the wait for an unreachable collector, and so the thread.
            self._exporter.shutdown()
        await flushing


def _context(trace_id: int, span_id: int, sampled: bool) -> OtelContext:
    return OtelContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(sampled))


class _OurLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.warning("message of the trace exporter", said=record.getMessage())


def _tell_in_our_log() -> None:
    """Send the SDK's log records to the service's structured log."""
    theirs = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _OurLog) for handler in theirs.handlers):
        theirs.addHandler(_OurLog())
        theirs.propagate = False
