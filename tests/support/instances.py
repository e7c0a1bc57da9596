"""Helpers for the instances that a router lists."""

from __future__ import annotations

from pointsman.router.v1 import fleet_pb2

# States in which ListInstances shows an instance whose keys are complete. A drain or cordon hides READY.
IN_STEP = (fleet_pb2.INSTANCE_STATE_READY, fleet_pb2.INSTANCE_STATE_DRAINING, fleet_pb2.INSTANCE_STATE_CORDONED)


def counters(status: fleet_pb2.InstanceStatus) -> dict[str, int]:
    """Return the router's own load counters of an instance. All are zero if the instance has no open request."""
    return {
        "num_requests": status.num_requests,
        "pending_prefill_tokens": status.pending_prefill_tokens,
        "ongoing_decode_tokens": status.ongoing_decode_tokens,
        "ongoing_tokens": status.ongoing_tokens,
    }
