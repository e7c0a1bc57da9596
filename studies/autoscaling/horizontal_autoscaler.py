"""Kubernetes' HorizontalPodAutoscaler for one external metric: computes the number of replicas from its figure. Pure.

Source: kubernetes, pkg/controller/podautoscaler/horizontal.go and replica_calculator.go; its documentation, "Horizontal Pod
Autoscaling", "Algorithm details" and "Configurable scaling behavior". KEDA creates such an object for each ScaledObject, and only
provides its metric.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

# Ratio by which the metric may differ from its target without a change; --horizontal-pod-autoscaler-tolerance, the default.
TOLERANCE = 0.1
# Interval between syncs, s; --horizontal-pod-autoscaler-sync-period, the default.
SYNC_EVERY_S = 15.0

TargetType = Literal["Value", "AverageValue"]


class ManifestError(ValueError):
    """A manifest that differs from what is modelled here; the message names the field."""


class RatePolicy(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Maximum number of replicas, or percentage of the replicas at the period's beginning, that are added or removed in a period
    (s)."""

    type: Literal["Pods", "Percent"]
    value: int
    period_seconds: float


class ScalingRules(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The rules of one direction. Of the proposals within the window (s) the safest one counts, and of the policies the one that
    allows most."""

    stabilization_window_seconds: float
    policies: tuple[RatePolicy, ...]


class ScalingBehavior(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The rules of both directions."""

    scale_up: ScalingRules
    scale_down: ScalingRules


@dataclass(frozen=True)
class AutoscalerSettings:
    """The settings of an autoscaler with one metric. `target` is in the metric's unit: for the metric itself ("Value"), or for
    the metric divided by the replicas ("AverageValue")."""

    min_replicas: int  # 1 or more
    max_replicas: int  # min_replicas or more
    target: float
    target_type: TargetType  # what `target` is for
    behavior: ScalingBehavior  # how fast the number of replicas may change, in both directions

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ManifestError(f"replicas: {self.min_replicas} to {self.max_replicas} is not a range from 1 on")
        if self.target <= 0:
            raise ManifestError(f"target: {self.target:g} is not above 0")


def settings_of_hpa(manifest: Mapping[str, Any]) -> AutoscalerSettings:
    """Return the settings of a HorizontalPodAutoscaler (autoscaling/v2) with one external metric. Raises ManifestError."""
    try:
        spec = manifest["spec"]
        [metric] = spec["metrics"]
        target = metric["external"]["target"]
        figures = {
            kind: target[field]
            for kind, field in (("Value", "value"), ("AverageValue", "averageValue"))
            if field in target
        }
        return _settings(
            spec["minReplicas"], spec["maxReplicas"], figures[target["type"]], target["type"], spec["behavior"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"HorizontalPodAutoscaler: {error!r}") from error


def settings_of_scaled_object(manifest: Mapping[str, Any]) -> AutoscalerSettings:
    """Return the settings of a ScaledObject (keda.sh/v1alpha1) with one Prometheus trigger. Raises ManifestError."""
    try:
        spec = manifest["spec"]
        [trigger] = spec["triggers"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        # The default is KEDA's.
        kind = trigger.get("metricType", "AverageValue")
        return _settings(
            spec["minReplicaCount"], spec["maxReplicaCount"], trigger["metadata"]["threshold"], kind, behavior
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"ScaledObject: {error!r}") from error


def _settings(least: int, most: int, target: str, kind: str, behavior: object) -> AutoscalerSettings:
    if kind not in ("Value", "AverageValue"):
        raise ManifestError(f"target type {kind!r} is not modelled")
    return AutoscalerSettings(least, most, float(target), kind, msgspec.convert(behavior, ScalingBehavior))  # type: ignore[arg-type]


class HorizontalAutoscaler:
    """The controller of one fleet. It remembers its proposals and changes for the length of its windows."""

    def __init__(self, settings: AutoscalerSettings, replicas: int, now: float) -> None:
        """`replicas` is the number of replicas at the beginning, `now` (s). It counts as the first proposal."""
        self.settings = settings
        self._proposals: deque[tuple[float, int]] = deque([(now, replicas)])
        # (time, change of the number of replicas)
        self._changes: deque[tuple[float, int]] = deque()

    def replicas(self, figure: float | None, current: int, ready: int, now: float) -> int:
        """Return the number of replicas to have, computed from the metric's `figure` (None: unknown). `current` is the number of
        wanted replicas, `ready` that of ready ones. To be called at each sync; `now` (s) must not decrease. Mutates.

        ratio    = figure / target, or figure / (target x current) of an AverageValue
        proposal = current where |1 - ratio| <= TOLERANCE, else ceil(ratio x ready), or ceil(figure / target)
        stable   = current, raised to the least proposal of the upward window, lowered to the greatest of the downward one
        result   = stable within what the policies and min_replicas to max_replicas allow
        """
        if figure is None:
            return current
        proposal = self._proposal(figure, current, ready)
        result = self._limited(current, self._stable(proposal, current, now), now)
        if result != current:
            self._changes.append((now, result - current))
        return result

    def _proposal(self, figure: float, current: int, ready: int) -> int:
        settings = self.settings
        average = settings.target_type == "AverageValue"
        ratio = figure / (settings.target * (current if average else 1))
        if abs(1.0 - ratio) <= TOLERANCE:
            return current
        return math.ceil(figure / settings.target) if average else math.ceil(ratio * ready)

    def _stable(self, proposal: int, current: int, now: float) -> int:
        up_s = self.settings.behavior.scale_up.stabilization_window_seconds
        down_s = self.settings.behavior.scale_down.stabilization_window_seconds
        while self._proposals and self._proposals[0][0] <= now - max(up_s, down_s):
            self._proposals.popleft()
        at_least = min([proposal, *(earlier for at, earlier in self._proposals if at > now - up_s)])
        at_most = max([proposal, *(earlier for at, earlier in self._proposals if at > now - down_s)])
        self._proposals.append((now, proposal))
        return min(max(current, at_least), at_most)

    def _limited(self, current: int, wanted: int, now: float) -> int:
        settings = self.settings
        if wanted > current:
            allowed = max(
                current, *(self._most(policy, current, now) for policy in settings.behavior.scale_up.policies)
            )
            return min(wanted, allowed, settings.max_replicas)
        if wanted < current:
            allowed = min(
                current, *(self._least(policy, current, now) for policy in settings.behavior.scale_down.policies)
            )
            return max(wanted, allowed, settings.min_replicas)
        return current

    def _most(self, policy: RatePolicy, current: int, now: float) -> int:
        before = self._before(policy, current, now)
        return before + policy.value if policy.type == "Pods" else math.ceil(before * (1 + policy.value / 100))

    def _least(self, policy: RatePolicy, current: int, now: float) -> int:
        before = self._before(policy, current, now)
        return before - policy.value if policy.type == "Pods" else int(before * (1 - policy.value / 100))

    def _before(self, policy: RatePolicy, current: int, now: float) -> int:
        """Return the number of replicas at the beginning of the policy's period."""
        return current - sum(change for at, change in self._changes if at > now - policy.period_seconds)
