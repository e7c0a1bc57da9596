"""Spans on their way to a collector, over OTLP/gRPC. Imports the SDK: to be imported itself only where an endpoint is set.

Batches, their sizes and delays, headers and certificates are as the standard variables OTEL_BSP_*, OTEL_EXPORTER_OTLP_* and
OTEL_RESOURCE_ATTRIBUTES say. Nothing here waits for the collector: what does not fit into the queue is dropped and logged.
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

from pointsman.common.core.tracing import Span, SpanKind

log = structlog.get_logger()

# What is queued may take this long when the process ends.
FLUSH_S = 3.0
_KINDS = {SpanKind.SERVER: OtelKind.SERVER, SpanKind.CLIENT: OtelKind.CLIENT}


class Tracer:
    """Sends the spans of one process, which `service` and `instance` name to whoever looks at them. To be closed."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        self._resource = Resource.create({"service.name": f"pointsman-{service}", "service.instance.id": instance})
        self._exporter = OTLPSpanExporter(endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        _tell_in_our_log()

    def send(self, spans: Iterable[Span]) -> None:
        """Queue finished spans. Those of a trace that is not sampled go nowhere."""
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
        """Send what is queued, for FLUSH_S at most."""
        flushing = asyncio.ensure_future(asyncio.to_thread(self._processor.shutdown))
        await asyncio.wait({flushing}, timeout=FLUSH_S)
        if not flushing.done():
            # Ends the wait for a collector that is not there, and with it the thread.
            self._exporter.shutdown()
        await flushing


def _context(trace_id: int, span_id: int, sampled: bool) -> OtelContext:
    return OtelContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(sampled))


class _OurLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.warning("traces", said=record.getMessage())


def _tell_in_our_log() -> None:
    """What the SDK has to say goes where all else is said, in its form."""
    theirs = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _OurLog) for handler in theirs.handlers):
        theirs.addHandler(_OurLog())
        theirs.propagate = False
