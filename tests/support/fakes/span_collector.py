"""A collector of spans: a real OTLP/gRPC receiver that stores the spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.waiting import until

WITHIN_S = 60.0
WORKERS = 2


@dataclass(frozen=True)
class Seen:
    """One received span. Times are Unix ns, ids hexadecimal."""

    name: str  # after the service's name: "router decide"
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    moments: dict[str, int]
    error: str

    def holds(self, other: Seen) -> bool:
        """Return whether `other` begins and ends within this span."""
        return self.start_ns <= other.start_ns <= other.end_ns <= self.end_ns


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The spans received so far, from all threads."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Seen] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = _plain(resource.resource.attributes).get("service.name", "")
            self.spans += [_seen(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str, count: int) -> list[Seen]:
        """Wait until `count` spans of a trace have come; return them in order of their start."""

        def found() -> list[Seen]:
            # By span id: an exporter that received no response sends a batch again.
            spans = list({span.span_id: span for span in list(self.spans) if span.trace_id == trace_id}.values())
            return spans if len(spans) >= count else []

        spans = until(found, within_s=WITHIN_S, what=f"{count} spans of the trace {trace_id}")
        assert len(spans) == count, spans
        return sorted(spans, key=lambda span: span.start_ns)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector inside the block."""
    collector = Collector()
    pool = ThreadPoolExecutor(WORKERS)
    # Start all threads of the pool now: a thread that starts during a later test would be reported as that test's leak.
    begun = threading.Barrier(WORKERS)
    wait([pool.submit(begun.wait) for _ in range(WORKERS)])
    server = grpc.server(pool)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
        pool.shutdown()


def _seen(service: str, span: Span) -> Seen:
    return Seen(
        f"{service.removeprefix('pointsman-')} {span.name}",
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _plain(span.attributes),
        {event.name: event.time_unix_nano for event in span.events},
        span.status.message if span.status.code == Status.STATUS_CODE_ERROR else "",
    )


def _plain(attributes: Any) -> dict[str, Any]:
    def value(attribute: KeyValue) -> Any:
        return getattr(attribute.value, attribute.value.WhichOneof("value") or "string_value")

    return {attribute.key: value(attribute) for attribute in attributes}
