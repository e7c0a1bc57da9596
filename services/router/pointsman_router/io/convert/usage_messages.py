"""Conversions of gateways' usage reports of API keys, and of the grants that they are answered with."""

from __future__ import annotations

from pointsman.router.v1 import placement_pb2
from pointsman_router.core.usage_accounts import KeyReport, UsageAnswer

# Maximum number of keys of a report; the rest is ignored.
_MAX_USAGE_KEYS = 1_000
# Maximum of a limit per minute, and of each amount of requests or tokens.
_MAX_LIMIT = 10**12
# Maximum number of requests in flight of a key.
_MAX_IN_FLIGHT = 10**6
# Length of a key's digest, bytes.
_USAGE_KEY_BYTES = 16


def usage_reports(wire: placement_pb2.UsageReport) -> list[KeyReport]:
    """Return a gateway process's reports on keys, without those with impossible figures: one bad figure could block a tenant for
    hours."""
    return [
        KeyReport(
            key=one.key,
            requests_per_minute=one.requests_per_minute,
            tokens_per_minute=one.tokens_per_minute,
            max_in_flight=min(one.max_in_flight, _MAX_IN_FLIGHT),
            used_requests=one.used_requests,
            used_tokens=one.used_tokens,
            in_flight=one.in_flight,
            returned_requests=one.returned_requests,
            returned_tokens=one.returned_tokens,
            returned_slots=one.returned_slots,
            wanted=one.wanted,
            level_requests=one.level_requests,
            level_tokens=one.level_tokens,
            held_requests=one.held_requests,
            held_tokens=one.held_tokens,
            held_slots=one.held_slots,
            lease_ended=one.lease_ended,
        )
        for one in wire.keys[:_MAX_USAGE_KEYS]
        if _is_possible(one)
    ]


def _is_possible(one: placement_pb2.KeyReport) -> bool:
    # NaN fails each of the comparisons.
    amounts = (one.used_requests, one.returned_requests, one.returned_tokens, one.held_requests, one.held_tokens)
    levels = (one.used_tokens, one.level_requests, one.level_tokens)
    return (
        len(one.key) == _USAGE_KEY_BYTES
        and max(one.requests_per_minute, one.tokens_per_minute) <= _MAX_LIMIT
        and max(one.in_flight, one.returned_slots, one.held_slots) <= _MAX_IN_FLIGHT
        and all(0 <= amount <= _MAX_LIMIT for amount in amounts)
        and all(-_MAX_LIMIT <= level <= _MAX_LIMIT for level in levels)
    )


def usage_answer_to_wire(answer: UsageAnswer) -> placement_pb2.UsageAnswer:
    """Convert the answer to a usage report: what the gateway is granted."""
    return placement_pb2.UsageAnswer(
        gateways=answer.gateways,
        tell_all=answer.tell_all,
        keys=[
            placement_pb2.KeyGrant(
                key=one.key,
                requests=one.requests,
                tokens=one.tokens,
                slots=one.slots,
                level_requests=one.level_requests,
                level_tokens=one.level_tokens,
                wanted=one.wanted,
            )
            for one in answer.grants
        ],
    )
