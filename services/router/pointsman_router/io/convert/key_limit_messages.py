"""Conversions of gateways' usage reports of API keys, and of the grants that they are answered with."""

from __future__ import annotations

from pointsman.router.v1 import placement_pb2
from pointsman_router.core.key_limit_accounts import KeyLimitAnswer, KeyReport

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
            key=report.key,
            requests_per_minute=report.requests_per_minute,
            tokens_per_minute=report.tokens_per_minute,
            max_in_flight=min(report.max_in_flight, _MAX_IN_FLIGHT),
            used_requests=report.used_requests,
            used_tokens=report.used_tokens,
            in_flight=report.in_flight,
            returned_requests=report.returned_requests,
            returned_tokens=report.returned_tokens,
            returned_slots=report.returned_slots,
            wanted=report.wanted,
            level_requests=report.level_requests,
            level_tokens=report.level_tokens,
            held_requests=report.held_requests,
            held_tokens=report.held_tokens,
            held_slots=report.held_slots,
            lease_ended=report.lease_ended,
        )
        for report in wire.keys[:_MAX_USAGE_KEYS]
        if _is_possible(report)
    ]


def _is_possible(report: placement_pb2.KeyReport) -> bool:
    # NaN fails each of the comparisons.
    amounts = (
        report.used_requests,
        report.returned_requests,
        report.returned_tokens,
        report.held_requests,
        report.held_tokens,
    )
    levels = (report.used_tokens, report.level_requests, report.level_tokens)
    return (
        len(report.key) == _USAGE_KEY_BYTES
        and max(report.requests_per_minute, report.tokens_per_minute) <= _MAX_LIMIT
        and max(report.in_flight, report.returned_slots, report.held_slots) <= _MAX_IN_FLIGHT
        and all(0 <= amount <= _MAX_LIMIT for amount in amounts)
        and all(-_MAX_LIMIT <= level <= _MAX_LIMIT for level in levels)
    )


def usage_answer_to_wire(answer: KeyLimitAnswer) -> placement_pb2.UsageAnswer:
    """Convert the answer to a usage report: what the gateway is granted."""
    return placement_pb2.UsageAnswer(
        gateways=answer.gateways,
        tell_all=answer.tell_all,
        keys=[
            placement_pb2.KeyGrant(
                key=grant.key,
                requests=grant.requests,
                tokens=grant.tokens,
                slots=grant.slots,
                level_requests=grant.level_requests,
                level_tokens=grant.level_tokens,
                wanted=grant.wanted,
            )
            for grant in answer.grants
        ],
    )
