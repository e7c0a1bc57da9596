"""The base of all policies: settings with bounds, helpers for results, and `decide`, which makes a decision of a result. Pure."""

from __future__ import annotations

import inspect
import math
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from msgspec.structs import replace

from pointsman_router.core.placement_types import (
    Candidate,
    Decision,
    FleetView,
    PlacementRequest,
    PolicyRef,
    PolicyResult,
    PoolFacts,
    Step,
    StepKind,
    route_class,
)

# Note on a decision that continues a stream whose instance is gone.
RESUMED = "resumed"
NO_KV_TRANSFER = "no_kv_transfer"


class SettingError(ValueError):
    """Raised for an unknown policy or setting, or a value out of range; `field` names it, `message` says what is wrong."""

    def __init__(self, field_name: str, message: str) -> None:
        super().__init__(f"{field_name}: {message}")
        self.field, self.message = field_name, message

    @property
    def sentence(self) -> str:
        """What is wrong, with the name of the policy's setting, for who did not write the request that has `field`."""
        return self.message if self.field == "name" else f"{self.field.removeprefix('settings.')}: {self.message}"


def setting(default: float, low: float, high: float, doc: str) -> Any:
    """Declare a numeric setting of a policy with inclusive bounds, checked by `make_policy`. `doc` is its help text."""
    return field(default=float(default), metadata={"low": low, "high": high, "doc": doc})


def choice(default: str, options: tuple[str, ...], doc: str) -> Any:
    """Declare a setting that is one of `options`, checked by `make_policy`."""
    return field(default=default, metadata={"options": options, "doc": doc})


def switch(default: bool, doc: str) -> Any:
    """Declare a setting that is true or false, checked by `make_policy`."""
    return field(default=default, metadata={"switch": True, "doc": doc})


def bounds(setting: Field[Any]) -> str:
    """Return a setting's allowed values as text: "0 to 1", "cost or heuristic", "true or false"."""
    if options := setting.metadata.get("options"):
        return " or ".join(options)
    if "switch" in setting.metadata:
        return "true or false"
    return f"{setting.metadata['low']:g} to {setting.metadata['high']:g}"


def settings_of(kind: type[Policy]) -> tuple[Field[Any], ...]:
    """Return the settings of a policy. Raises TypeError for a field that is none, such as one with a state."""
    for field_ in fields(kind):
        if "doc" not in field_.metadata:
            raise TypeError(f"field {field_.name!r} of {kind.__name__} is no setting: setting(), choice() or switch()")
    return fields(kind)


def summary(kind: type[Policy]) -> str:
    """Return the first sentence of a policy's docstring."""
    first, _, _ = inspect.cleandoc(kind.__doc__ or "").replace("\n", " ").partition(". ")
    return first.rstrip(".") + "."


class TakenPolicy(NamedTuple):
    """The policy that decides for a pool. If another policy takes it, `reason` (of reasons.py) says why, `admits_sessions`
    whether sessions are to be admitted under it although the setting does not ask for it, and `provisional` whether it was taken
    because too little is known of the pool."""

    policy: Policy
    reason: str = ""
    admits_sessions: bool = False
    provisional: bool = False

    def acts_as(self, other: TakenPolicy) -> bool:
        """Return whether requests are placed and sessions admitted as under `other`, for whatever reasons."""
        return self.policy == other.policy and self.admits_sessions == other.admits_sessions


@dataclass(frozen=True)
class Policy(ABC):
    """A pure function from request and view to a result; its dataclass fields are its settings."""

    name: ClassVar[str]
    # Whether the policy prefers the less loaded of two equally cached instances, and needs only FleetView.unseen of the instances
    # that it does not choose. Such a policy gets only a part of a large pool as candidates.
    uses_shortlist: ClassVar[bool] = False

    @abstractmethod
    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        """Choose the instance that answers from `view.eligible()` (not empty), and optionally another one that prefills for it
        from `view.sources_of()`; or hold the request. The result must depend on nothing but the arguments."""

    def taken(self, facts: PoolFacts) -> TakenPolicy:
        """Return the policy that decides for a pool of which `facts` are known: this one, unless it leaves the choice to
        others."""
        return TakenPolicy(self)

    def without_holds(self, facts: PoolFacts) -> Policy | None:
        """Return the policy that places a request which this policy has held for the maximum time, in a pool of which `facts` are
        known; None: `unified`."""
        return None

    def ref(self) -> PolicyRef:
        """Return name and settings, as decisions record them."""
        return self._ref

    @cached_property
    def _ref(self) -> PolicyRef:
        return PolicyRef(self.name, {field_.name: getattr(self, field_.name) for field_ in fields(self)})


def build(kind: type[Policy], settings: Mapping[str, object]) -> Policy:
    """Return a policy of class `kind` with `settings` over its defaults. Raises SettingError for an unknown setting or a value
    out of range."""
    known: dict[str, Field[Any]] = {field_.name: field_ for field_ in settings_of(kind)}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            others = f"has {', '.join(sorted(known))}" if known else "has none"
            raise SettingError(f"settings.{name}", f"policy {kind.name} has no such setting; it {others}")
        values[name] = _checked(known[name], value)
    return kind(**values)


def _checked(setting: Field[Any], value: object) -> float | str | bool:
    name = f"settings.{setting.name}"
    if options := setting.metadata.get("options"):
        if not isinstance(value, str) or value not in options:
            raise SettingError(name, f"must be {bounds(setting)}")
        return value
    if "switch" in setting.metadata:
        if not isinstance(value, bool):
            raise SettingError(name, f"must be {bounds(setting)}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(name, "must be a number")
    if not setting.metadata["low"] <= value <= setting.metadata["high"]:
        # An integer may be too large for the format.
        shown = f"{value:g}" if isinstance(value, float) or abs(value) < sys.float_info.max else "the number"
        raise SettingError(name, f"{shown} is outside {bounds(setting)}")
    return float(value)


def serve(candidate: Candidate, reason: str, scores: Mapping[str, float] | None = None) -> PolicyResult:
    """Return a result of one SERVE step on `candidate`."""
    return PolicyResult((Step(StepKind.SERVE, candidate.instance_id, reason),), reason, scores or {})


def offload(
    request: PlacementRequest,
    prefill: Candidate,
    decode: Candidate,
    rule: str,
    reason: str,
    *,
    scores: Mapping[str, float] | None = None,
    figures: Mapping[str, float] | None = None,
    owner: str = "",
) -> PolicyResult:
    """Return a result of two steps: PREFILL of the whole prompt on `prefill`, then SERVE on `decode` with that KV."""
    steps = (
        Step(StepKind.PREFILL, prefill.instance_id, rule, prefix_tokens=request.input_tokens),
        Step(StepKind.SERVE, decode.instance_id, rule, kv_source=prefill.instance_id),
    )
    return PolicyResult(steps, reason, scores or {}, figures or {}, owner)


def slice_of(
    candidate: Candidate, prefix_tokens: int, reason: str, scores: Mapping[str, float] | None = None
) -> PolicyResult:
    """Return a result that computes the prompt's first `prefix_tokens` on `candidate`; the policy is then asked again."""
    step = Step(StepKind.PREFILL, candidate.instance_id, reason, prefix_tokens=prefix_tokens)
    return PolicyResult((step,), reason, scores or {})


def fetch_of(
    candidate: Candidate, prefix_tokens: int, source: str, reason: str, scores: Mapping[str, float] | None = None
) -> PolicyResult:
    """Return a result that has `source` send the KV of the prompt's first `prefix_tokens`, which it has cached, to `candidate`;
    the policy is then asked again."""
    step = Step(StepKind.PREFILL, candidate.instance_id, reason, prefix_tokens=prefix_tokens, kv_source=source)
    return PolicyResult((step,), reason, scores or {})


def hold(
    reason: str,
    max_hold_s: float = 0.0,
    scores: Mapping[str, float] | None = None,
    queue_penalty_s: float | None = None,
    waits_for: str = "",
) -> PolicyResult:
    """Return a result that holds the request: the router asks again when something frees, until `max_hold_s` after the request
    first came (0: as long as the router holds requests). `queue_penalty_s`: place in the queue (None: by new tokens).

    `waits_for`: the instance that must have less to do first; empty: any. When something frees, the router retries only some of
    the requests that wait for the same instance. All requests without `waits_for` form one such line, so each may wait behind all
    the others."""
    return PolicyResult(
        (), reason, scores or {}, max_hold_s=max_hold_s, queue_penalty_s=queue_penalty_s, waits_for=waits_for
    )


def least(candidates: Sequence[Candidate], decision_number: int, key: Callable[[Candidate], Any]) -> Candidate:
    """Return the candidate with the least `key` (comparable); ties in turn. `candidates` must not be empty."""
    return min(rotated(candidates, decision_number), key=key)


def lowest(
    candidates: Sequence[Candidate],
    scores: Mapping[str, float],
    decision_number: int,
    then: Callable[[Candidate], Any] | None = None,
) -> Candidate:
    """Return the candidate with the least score (`scores` by instance id); ties by `then`, then in turn. `candidates` must not be
    empty."""
    turned = rotated(candidates, decision_number)
    listed = [scores[candidate.instance_id] for candidate in turned]
    low = min(listed)
    if then is None or listed.count(low) == 1:
        return turned[listed.index(low)]
    return min([candidate for candidate, score in zip(turned, listed, strict=True) if score == low], key=then)


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean; 0 if there are no values."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def rotated(candidates: Sequence[Candidate], decision_number: int) -> Sequence[Candidate]:
    """Return the candidates, rotated by `decision_number`. This is the last tie-break: all scores of an idle, cold fleet are
    0."""
    start = decision_number % max(len(candidates), 1)
    return (*candidates[start:], *candidates[:start])


def decide(
    policy: Policy,
    request: PlacementRequest,
    pool: str,
    view: FleetView,
    rng: random.Random,
    decision_id: str,
    *,
    degraded: bool = False,
) -> Decision:
    """Decide on one request. `view` must have at least one eligible candidate. The same arguments lead to the same decision.

    If the engines of an OFFLOAD plan cannot transfer KV to each other, only its last step is kept (`no_kv_transfer`).
    A decision to hold has mode HELD and no steps; its class and cached tokens are those of the best cached candidate.
    """
    result = policy.choose(request, view, rng)
    if not _kv_can_pass(result, view):
        last = result.steps[-1]
        result = replace(result, steps=(Step(StepKind.SERVE, last.instance_id, last.reason),), reason=NO_KV_TRANSFER)
    if steps := result.steps:
        # The class is by the work of the prefill, whichever instance answers.
        prefills = chosen = _named(view, steps[0].instance_id)
        mode = "COLOCATED"
        if len(steps) > 1:
            chosen = _named(view, steps[-1].instance_id)
            if any(step.instance_id != chosen.instance_id for step in steps):
                mode = "OFFLOAD"
    else:
        prefills = chosen = max(view.eligible(), key=lambda candidate: candidate.cached_tokens)
        mode = "HELD"
    runner_up, margin = _runner_up(result.scores, chosen.instance_id)
    return Decision(
        decision_id=decision_id,
        request=request,
        pool=pool,
        view=view,
        policy=policy.ref(),
        result=result,
        route_class=route_class(prefills.new_tokens, request.input_tokens),
        mode=mode,
        cached_tokens=chosen.cached_tokens,
        kv_load=chosen.kv_load,
        runner_up=runner_up,
        margin=margin,
        key_count=len(request.keys),
        degraded=degraded,
        notes=(*((RESUMED,) if request.resumed else ()), *(_owner_note(view) if view.session_owner else ())),
    )


def _kv_can_pass(result: PolicyResult, view: FleetView) -> bool:
    """Return whether KV can be transferred for every step that needs another instance's KV."""
    return all(
        _named(view, step.kv_source).can_give_kv_to(_named(view, step.instance_id))
        for step in result.steps
        if step.kv_source
    )


def _named(view: FleetView, instance_id: str) -> Candidate:
    found = view.find(instance_id)
    if found is None:
        raise LookupError(f"no candidate {instance_id!r}")
    return found


def _runner_up(scores: Mapping[str, float], chosen: str) -> tuple[str, float | None]:
    """Return the best scored candidate besides `chosen` ("" if there is none; of equal ones the first by name), and by how much
    its score is worse than the chosen one's (None: unknown)."""
    others = dict(scores)
    own = others.pop(chosen, None)
    least_score = min(others.values(), default=math.inf)
    if least_score == math.inf:
        return "", None
    runner_up = min([instance_id for instance_id, score in others.items() if score == least_score])
    return runner_up, None if own is None else least_score - own


def _owner_note(view: FleetView) -> tuple[str, ...]:
    """Return why a session had to leave its owner, independent of the policy: owner_draining, owner_saturated, ..., owner_gone;
    empty if it did not."""
    owner = view.find(view.session_owner)
    if owner is None:
        return ("owner_gone",)
    return (f"owner_{owner.excluded}",) if owner.excluded else ()
