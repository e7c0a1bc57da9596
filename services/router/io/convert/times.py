"""Times and numbers on the wire."""

from __future__ import annotations

import math

from google.protobuf import duration_pb2, timestamp_pb2


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as a protobuf duration; negative ones become 0."""
    nanos = max(int(seconds * 1e9), 0)
    return duration_pb2.Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def change(seconds: float) -> duration_pb2.Duration:
    """Seconds, negative ones too, as a protobuf duration."""
    wire = duration_pb2.Duration()
    wire.FromNanoseconds(int(seconds * 1e9))
    return wire


def seconds(wire: duration_pb2.Duration) -> float:
    """The inverse of `duration`; without the detour over an integer that ToNanoseconds takes."""
    return wire.seconds + wire.nanos / 1e9


def timestamp(unix_s: float) -> timestamp_pb2.Timestamp:
    """Unix seconds as a protobuf timestamp."""
    nanos = int(unix_s * 1e9)
    return timestamp_pb2.Timestamp(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def finite(value: float) -> float:
    """`value`, or 0 where it is infinite or NaN."""
    # The decision log is JSON, which has neither infinity nor NaN; a peer that sends them says nothing.
    return value if math.isfinite(value) else 0.0
