"""Past decisions made again. Pure.

A decision's randomness comes from its id alone, so that id, request, view and policy are all it takes to make it again, in any
process and any order.
"""

from __future__ import annotations

import random
from dataclasses import replace

from xxhash import xxh3_64_intdigest

from services.router.domain import Decision
from services.router.policy.base import Policy, decide
from services.router.policy.registry import make_policy

# What a decision consists of, beside its inputs.
COMPARED = ("ruling", "route_class", "mode", "cached_tokens", "runner_up", "margin", "inputs_digest")


def rng_of(decision_id: str) -> random.Random:
    """The random numbers that belong to a decision."""
    return random.Random(xxh3_64_intdigest(decision_id.encode()))


def decide_again(decision: Decision, policy: Policy | None = None) -> Decision:
    """`decision` made again on its recorded request and view, under `policy` or the recorded one.

    SettingError when the recorded policy does not exist here, or a setting of it is out of range.
    """
    if policy is None:
        policy = make_policy(decision.policy.name, decision.policy.settings)
    again = decide(
        policy,
        decision.request,
        decision.pool,
        decision.view,
        rng_of(decision.decision_id),
        decision.decision_id,
        degraded=decision.degraded,
    )
    # The keys are not recorded; what they led to is in the view.
    return replace(again, key_count=decision.key_count)


def differences(was: Decision, again: Decision) -> list[str]:
    """What differs between two outcomes of a decision, as "field: was -> again" lines; empty when they are equal to the bit."""
    return [
        f"{name}: {getattr(was, name)!r} -> {getattr(again, name)!r}"
        for name in COMPARED
        if getattr(was, name) != getattr(again, name)
    ]
