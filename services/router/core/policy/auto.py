"""`auto`: takes the best known policy for each pool, by what is known of the pool. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from msgspec import structs

from pointsman.router.core.policy.base import Policy, TakenPolicy
from pointsman.router.core.policy.elastic import Elastic
from pointsman.router.core.policy.foresight import Foresight
from pointsman.router.core.policy.unified import Unified
from pointsman.router.core.types import FleetView, PlacementRequest, PolicyResult, PoolFacts

_FORESIGHT, _UNIFIED, _ELASTIC = Foresight(), Unified(), Elastic()
# Minimum share of a pool's instances with exact prefixes, and of those with a learned curve, for `foresight`. Below 1, since in
# a large pool some instance always starts or is resynchronised.
KNOWN_SHARE = 0.5


_BY_PRODUCERS = TakenPolicy(_ELASTIC, "has_producers")
_BY_PREFIXES = TakenPolicy(_UNIFIED, "few_exact_prefixes")
_BY_CURVE = TakenPolicy(_UNIFIED, "curve_not_learned")
_BEST = TakenPolicy(_FORESIGHT, "times_predictable", admits_sessions=True)


@dataclass(frozen=True)
class Auto(Policy):
    """The best known policy for each pool: `foresight` where times can be predicted, else `unified` or `elastic`.

    Choice, by the pool's READY instances; the first that applies:
        1. `elastic`, if any instance only prefills for others: no other policy here gives such an instance work
        2. `unified`, if under half of the instances report KV events that are in use
        3. `unified`, if for under half of them the prefill curve of their hardware is learned, that is from 12 samples
        4. `foresight`
    Then the request is decided as under that policy with its default settings, also its hold, and the rest of a prompt of which
    slices are computed. Each decision names the policy and the reason.

    Reasons of the choice: `has_producers` (1), `few_exact_prefixes` (2), `curve_not_learned` (3), `times_predictable` (4).
    Reasons: those of the chosen policy.
        `foresight`'s: `at_once`, `held`, `slice`, `last_part`
        `unified`'s: `session_affinity`, `least_load_x_work`, `ceiling_changed_choice`
        `elastic`'s: `prefill_idle_decode_busy`, `decode_idle`, `transfer_dominates`, `prefill_overloaded`, `below_threshold`,
            `no_other_instance`
        of the choice: `has_producers`, `few_exact_prefixes`, `curve_not_learned`, `times_predictable`
    Source: Pointsman's own study (docs/findings.md).
    """

    name: ClassVar[str] = "auto"

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        taken = self.taken(view.facts)
        result = taken.policy.choose(request, view, rng)
        return structs.replace(result, policy=taken.policy.name, policy_reason=taken.reason)

    def taken(self, facts: PoolFacts) -> TakenPolicy:
        if facts.producers:
            return _BY_PRODUCERS
        if not facts.instances or facts.exact < KNOWN_SHARE * facts.instances:
            return _BY_PREFIXES
        return _BEST if facts.learned >= KNOWN_SHARE * facts.instances else _BY_CURVE

    def without_holds(self) -> Policy:
        """Return `foresight` without holds: of the policies that are taken, only `foresight` holds requests."""
        return _FORESIGHT.without_holds()


class SessionAdmission(NamedTuple):
    """Whether sessions are admitted in a pool, and why: `setting`, or the reason for the policy that is taken."""

    applies: bool
    reason: str


def session_admission(policy: Policy, facts: PoolFacts, *, switched_on: bool) -> SessionAdmission:
    """Return whether sessions are admitted in a pool of which `facts` are known, under `policy`. `switched_on`: the setting."""
    taken = policy.taken(facts)
    if switched_on or not taken.reason:
        return SessionAdmission(switched_on, "setting")
    return SessionAdmission(taken.admits_sessions, taken.reason)
