"""`auto`: takes the best known policy for each pool, by what is known of the pool. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from msgspec import structs

from pointsman_router.core.placement_types import FleetView, PlacementRequest, PolicyResult, PoolFacts
from pointsman_router.core.policy.base import Policy, TakenPolicy
from pointsman_router.core.policy.foresight import Foresight
from pointsman_router.core.policy.unified import Unified

# `foresight` for those who choose nothing: with higher prices on answers beside prefills, and more time for new ones, for TPOT.
_FORESIGHT = Foresight(remainder_weight=1.0, interference=0.1, answer_factor=1.5)
_UNIFIED = Unified()
# Minimum share of a pool's instances with exact prefixes, and of those with a learned curve, for `foresight`. Below 1, since in
# a large pool some instance always starts or is resynchronised.
KNOWN_SHARE = 0.5
# Minimum number of instances for `foresight` and for the admission of sessions. With two, TTFT p99 varies so much between draws
# that 20 of them do not exclude a change of +24 % against `unified`.
FEW_INSTANCES = 3
# Mean costs of a prefill, as multiples of that of a cold prompt of LIGHT_NEW_TOKENS: `foresight` is taken from the first on and
# below the second, and `unified` elsewhere.
SHORT_COST, LONG_COST = 0.5, 20.0

_BY_PREFIXES = TakenPolicy(_UNIFIED, "few_exact_prefixes", provisional=True)
_BY_CURVE = TakenPolicy(_UNIFIED, "curve_not_learned", provisional=True)
_SHORT = TakenPolicy(_UNIFIED, "prefills_short")
_PREDICTABLE = TakenPolicy(_FORESIGHT, "times_predictable", admits_sessions=True)
_LONG = TakenPolicy(_UNIFIED, "prefills_long", admits_sessions=True)
_FEW = TakenPolicy(_UNIFIED, "few_instances")


@dataclass(frozen=True)
class Auto(Policy):
    """The best known policy for each pool: `foresight` where it gains and times can be predicted, else `unified`.

    Choice, by the pool's READY instances and its requests; the first that applies:
        1. `unified`, if under half of the instances report KV events that are in use
        2. `unified`, if for under half of them the prefill curve of their hardware is learned, that is from 12 samples and 12
           requests of the pool on, or 100 if the mean prefill costs less than a prompt of 5,000 tokens
        3. `unified`, if the mean prefill costs less than half as much as a prompt of 5,000 tokens of which nothing is cached:
           then prefills hardly wait for each other, and holding them costs more than it saves
        4. `unified`, if the pool has fewer than 3 instances: with two, the longest TTFT varies too much to be sure of it
        5. `unified`, if the mean prefill costs 20 times as much or more: then slices of one prompt slow down the answers of all
           others
        6. `foresight` with remainder_weight=1, interference=0.1 and answer_factor=1.5
    What is known must ask for another choice for 10 s, and a choice is kept for 60 s, before it changes; the mean prefill must be
    10 % beyond a bound. Sooner: a pool's first change.
    Then the request is decided as under that policy, also its hold, and the rest of a prompt of which slices are computed. Each
    decision names the policy and the reason. The mean prefill is the moving average by which `foresight` itself is scaled.

    Reasons: those of the chosen policy, and those of the choice.
        `foresight`'s: `at_once`, `held`, `slice`, `last_part`, `fetch`, `awaits_kv`
        `unified`'s: `session_affinity`, `least_load_x_work`, `ceiling_changed_choice`
        of the choice: `few_exact_prefixes` (1), `curve_not_learned` (2), `prefills_short` (3),
            `few_instances` (4), `prefills_long` (5), `times_predictable` (6)
    Source: Pointsman's own study (docs/findings.md).
    """

    name: ClassVar[str] = "auto"
    uses_shortlist: ClassVar[bool] = True

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        taken = self.taken(view.facts)
        result = taken.policy.choose(request, view, rng)
        return structs.replace(result, policy=taken.policy.name, policy_reason=taken.reason)

    def taken(self, facts: PoolFacts) -> TakenPolicy:
        if not facts.instances or facts.exact < KNOWN_SHARE * facts.instances:
            return _BY_PREFIXES
        if facts.learned < KNOWN_SHARE * facts.instances:
            return _BY_CURVE
        if facts.mean_cost < SHORT_COST:
            return _SHORT
        if facts.instances < FEW_INSTANCES:
            return _FEW
        if facts.mean_cost >= LONG_COST:
            return _LONG
        return _PREDICTABLE

    def without_holds(self, facts: PoolFacts) -> Policy:
        """Return the policy that is taken, without its holds."""
        taken = self.taken(facts).policy
        return taken.without_holds(facts) or taken


class AdmissionChoice(NamedTuple):
    """Whether sessions are admitted in a pool, and why: `setting`, or the reason for the policy that is taken."""

    applies: bool
    reason: str


def admission_choice(policy: Policy, facts: PoolFacts, *, switched_on: bool) -> AdmissionChoice:
    """Return whether sessions are admitted in a pool of which `facts` are known, under `policy`. `switched_on`: the setting."""
    taken = policy.taken(facts)
    if switched_on or not taken.reason:
        return AdmissionChoice(switched_on, "setting")
    return AdmissionChoice(taken.admits_sessions, taken.reason)
