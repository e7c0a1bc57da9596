"""Makes recorded decisions again. Pure.

A decision's randomness follows from its id alone. So any process can make it again from its id, request, view and policy, in any
order.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from pointsman_router.core.admission_rule import AdmissionRecord, decide_admission
from pointsman_router.core.placement_types import Decision
from pointsman_router.core.policy.base import Policy, decide
from pointsman_router.core.policy.decision_rng import rng_of
from pointsman_router.core.policy.registry import POLICIES, Policies, make_policy

# The fields that a decision consists of, besides its inputs.
COMPARED = ("result", "route_class", "mode", "cached_tokens", "runner_up", "margin")


def inputs_digest(decision: Decision) -> int:
    """Return a hash that is equal for decisions on equal inputs, and takes as long as deciding.

    Ids are not included: the random numbers follow from the decision's id, and all parts of one prompt share a request id.
    """
    ref, request = decision.policy, decision.request
    # The keys are represented by the cached tokens in the view.
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


def redecide(decision: Decision, policy: Policy | None = None, policies: Policies = POLICIES) -> Decision:
    """Make `decision` again on its recorded request and view, under `policy` (None: the recorded one, of `policies`), and return
    the result.

    Raises SettingError if the recorded policy is not one of `policies`, or one of its settings is out of range.
    """
    if policy is None:
        policy = make_policy(decision.policy.name, decision.policy.settings, policies)
    again = decide(
        policy,
        decision.request,
        decision.pool,
        decision.view,
        rng_of(decision.decision_id),
        decision.decision_id,
        degraded=decision.degraded,
    )
    # The keys are not recorded; the view has the cached tokens that they led to.
    return replace(again, key_count=decision.key_count)


def admission_differences(record: AdmissionRecord | None) -> list[str]:
    """Return the difference of an admission and the one that is made again on its view, as `differences` does."""
    if record is None or (again := decide_admission(record.view)) == record.verdict:
        return []
    was = record.verdict
    return [f"admission: {was.outcome} ({was.reason}) -> {again.outcome} ({again.reason})"]


def differences(was: Decision, again: Decision) -> list[str]:
    """Return the differences of two outcomes of a decision, as "field: was -> again" lines; empty if they are equal bit for
    bit. The admission of its session is made again, too."""
    return admission_differences(was.request.admitted) + [
        f"{name}: {getattr(was, name)!r} -> {getattr(again, name)!r}"
        for name in COMPARED
        if getattr(was, name) != getattr(again, name)
    ]
