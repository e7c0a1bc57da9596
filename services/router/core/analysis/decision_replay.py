"""Past decisions made again. Pure.

A decision's randomness comes from its id alone, so that id, request, view and policy are all it takes to make it again, in any
process and any order.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from pointsman.router.core.policy.base import Policy, decide
from pointsman.router.core.policy.decision_rng import rng_of
from pointsman.router.core.policy.registry import make_policy
from pointsman.router.core.types import Decision

# What a decision consists of, beside its inputs.
COMPARED = ("result", "route_class", "mode", "cached_tokens", "runner_up", "margin")


def inputs_digest(decision: Decision) -> int:
    """Equal for decisions on equal inputs, ids left out: what is drawn at random follows from the decision's id, and the parts of
    one prompt have one request id. Made when it is asked for: it costs as much as deciding."""
    ref, request = decision.policy, decision.request
    # The cached tokens in the view stand for the keys.
    inputs = (
        ref.name,
        sorted(ref.settings.items()),
        decision.pool,
        request.session,
        request.input_tokens,
        request.max_output_tokens,
        request.exclude,
        request.age_s,
        request.sliceable_tokens,
        decision.view,
    )
    return xxh3_64_intdigest(msgspec.msgpack.encode(inputs))


def redecide(decision: Decision, policy: Policy | None = None) -> Decision:
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
