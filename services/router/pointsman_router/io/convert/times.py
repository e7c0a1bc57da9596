"""Conversions of times and numbers to and from protobuf."""

from __future__ import annotations

import math

from google.protobuf import duration_pb2, timestamp_pb2

# Maximum of a protobuf duration, s: some 10,000 years. A longer one cannot be written as JSON.
MAX_DURATION_S = 315_576_000_000


def duration(seconds: float) -> duration_pb2.Duration:
    """Convert seconds to a protobuf duration. Negative values become 0, those above MAX_DURATION_S become that."""
    nanos = max(int(min(seconds, MAX_DURATION_S) * 1e9), 0)
    return duration_pb2.Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def change(seconds: float) -> duration_pb2.Duration:
    """Convert seconds, which may be negative, to a protobuf duration."""
    wire = duration_pb2.Duration()
    wire.FromNanoseconds(int(seconds * 1e9))
    return wire


def seconds(wire: duration_pb2.Duration) -> float:
    """The inverse of `duration`. Faster than ToNanoseconds, which converts to an integer first."""
    return wire.seconds + wire.nanos / 1e9


def timestamp(unix_s: float) -> timestamp_pb2.Timestamp:
    """Convert unix seconds to a protobuf timestamp."""
    nanos = int(unix_s * 1e9)
    return timestamp_pb2.Timestamp(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def finite(value: float) -> float:
    """Return `value`, or 0 if it is infinite or NaN."""
    # The decision log is JSON, which has neither infinity nor NaN. A peer that sends one of them reports nothing.
    return value if math.isfinite(value) else 0.0
