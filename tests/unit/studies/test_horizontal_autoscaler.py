"""The autoscaler's model against what Kubernetes documents of its algorithm."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.autoscaling.horizontal_autoscaler import (
    TOLERANCE,
    AutoscalerSettings,
    HorizontalAutoscaler,
    ManifestError,
    RatePolicy,
    ScalingBehavior,
    ScalingRules,
    TargetType,
    settings_of_hpa,
    settings_of_scaled_object,
)

AT_ONCE = ScalingRules(0, (RatePolicy("Percent", 10_000, 1),))
# The API server's defaults for a HorizontalPodAutoscaler, except for the window.
ALL_AT_ONCE = ScalingRules(0, (RatePolicy("Percent", 100, 15),))


def settings(
    target: float = 100.0,
    *,
    least: int = 1,
    most: int = 100,
    target_type: TargetType = "Value",
    up: ScalingRules = AT_ONCE,
    down: ScalingRules = ALL_AT_ONCE,
) -> AutoscalerSettings:
    return AutoscalerSettings(least, most, target, target_type, ScalingBehavior(up, down))


def after(asked: AutoscalerSettings, figure: float | None, current: int, ready: int | None = None) -> int:
    return HorizontalAutoscaler(asked, current, -1e6).replicas(
        figure, current, current if ready is None else ready, 0.0
    )


@pytest.mark.parametrize(
    ("figure", "wanted"),
    [(200.0, 6), (50.0, 2), (100.0, 3), (109.0, 3), (91.0, 3), (112.0, 4), (40.0, 2), (0.0, 1), (None, 3)],
)
def test_the_documented_formula(figure: float | None, wanted: int) -> None:
    # "If the current metric value is 200m, and the desired value is 100m, the number of replicas will be doubled"; half of it:
    # ceil(3 x 0.5); nothing while the ratio is within 0.1 of 1; no figure, no change.
    assert after(settings(), figure, 3) == wanted


def test_replicas_that_are_not_ready_do_not_count() -> None:
    assert after(settings(), 300.0, 4, ready=2) == 6
    # The same figure with half of the replicas not ready asks for no more replicas than are starting.
    assert after(settings(), 200.0, 4, ready=2) == 4


def test_an_average_value_is_of_one_replica() -> None:
    average = settings(5.0, target_type="AverageValue")
    assert [after(average, waiting, 3) for waiting in (0.0, 15.0, 16.0, 17.0, 31.0)] == [1, 3, 3, 4, 7]


def test_bounds_hold() -> None:
    assert after(settings(least=2, most=5), 1e6, 3) == 5
    assert after(settings(least=2, most=5), 0.0, 3) == 2


def test_downscaling_takes_the_greatest_proposal_of_its_window() -> None:
    slow = settings(down=ScalingRules(300, ALL_AT_ONCE.policies))
    scaler = HorizontalAutoscaler(slow, 4, 0.0)
    # The initial count is the first recommendation.
    assert scaler.replicas(25.0, 4, 4, 15.0) == 4
    assert scaler.replicas(75.0, 4, 4, 285.0) == 4
    assert scaler.replicas(25.0, 4, 4, 300.0) == 3
    assert scaler.replicas(25.0, 3, 3, 584.0) == 3
    assert scaler.replicas(25.0, 3, 3, 600.0) == 1


def test_upscaling_takes_the_least_proposal_of_its_window() -> None:
    slow = settings(up=ScalingRules(60, AT_ONCE.policies))
    scaler = HorizontalAutoscaler(slow, 2, 0.0)
    assert [scaler.replicas(figure, 2, 2, at) for at, figure in ((15.0, 400.0), (30.0, 300.0), (45.0, 500.0))] == [
        2,
        2,
        2,
    ]
    # The initial count has left the window: min(8, 6, 10, 8).
    assert scaler.replicas(400.0, 2, 2, 60.0) == 6


def test_percent_of_those_at_the_periods_beginning() -> None:
    scaler = HorizontalAutoscaler(settings(most=20, up=ScalingRules(0, (RatePolicy("Percent", 100, 60),))), 3, 0.0)
    assert scaler.replicas(1e4, 3, 3, 15.0) == 6
    assert [scaler.replicas(1e4, 6, 3, at) for at in (30.0, 45.0, 60.0)] == [6, 6, 6]
    assert scaler.replicas(1e4, 6, 3, 75.0) == 12


def test_of_two_policies_the_one_that_allows_more() -> None:
    # The documentation's example: 80 replicas that shall be 10, by 10 % or 4 pods in a minute.
    both = ScalingRules(0, (RatePolicy("Pods", 4, 60), RatePolicy("Percent", 10, 60)))
    scaler, count, seen = HorizontalAutoscaler(settings(down=both), 80, 0.0), 80, []
    for minute in range(1, 14):
        count = scaler.replicas(100.0 * 10 / count, count, count, 60.0 * minute)
        seen.append(count)
    # 10 % are rounded up; from 40 replicas on 4 pods are more.
    assert seen == [72, 64, 57, 51, 45, 40, 36, 32, 28, 24, 20, 16, 12]


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 40)), min_size=1, max_size=30),
    st.integers(0, 300),
    st.integers(0, 900),
)
def test_it_never_leaves_bounds_nor_does_more_than_a_policy_allows(
    start: int, figures: list[tuple[float, int]], up_s: int, down_s: int
) -> None:
    up = ScalingRules(up_s, (RatePolicy("Percent", 100, 60),))
    down = ScalingRules(down_s, (RatePolicy("Pods", 1, 300),))
    scaler, count = HorizontalAutoscaler(settings(most=40, up=up, down=down), start, 0.0), start
    counts = [count] * 20
    for number, (figure, ready) in enumerate(figures, 1):
        before, count = count, scaler.replicas(figure, count, min(ready, count), 15.0 * number)
        assert 1 <= count <= 40
        # Up to twice as many as there were 60 s ago, and down to one fewer than there were 300 s ago.
        assert count <= max(before, 2 * counts[-4])
        assert count >= min(before, counts[-20] - 1)
        if abs(figure / 100.0 - 1) <= TOLERANCE and up_s == down_s == 0:
            assert count == before
        counts.append(count)


HPA: dict[str, Any] = {
    "spec": {
        "minReplicas": 1,
        "maxReplicas": 8,
        "metrics": [{"type": "External", "external": {"target": {"type": "Value", "value": "2"}}}],
        "behavior": {
            "scaleUp": {
                "stabilizationWindowSeconds": 0,
                "policies": [{"type": "Pods", "value": 4, "periodSeconds": 15}],
            },
            "scaleDown": {"stabilizationWindowSeconds": 300, "policies": []},
        },
    }
}
SCALED_OBJECT: dict[str, Any] = {
    "spec": {
        "minReplicaCount": 1,
        "maxReplicaCount": 8,
        "triggers": [{"type": "prometheus", "metricType": "Value", "metadata": {"threshold": "2"}}],
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": HPA["spec"]["behavior"]}},
    }
}


def changed(manifest: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"spec": manifest["spec"] | spec}


def test_settings_are_those_of_the_manifests() -> None:
    behavior = ScalingBehavior(ScalingRules(0, (RatePolicy("Pods", 4, 15),)), ScalingRules(300, ()))
    expected = AutoscalerSettings(1, 8, 2.0, "Value", behavior)
    assert settings_of_hpa(HPA) == settings_of_scaled_object(SCALED_OBJECT) == expected
    average = {"external": {"target": {"type": "AverageValue", "averageValue": "5"}}}
    assert settings_of_hpa(changed(HPA, metrics=[average])).target_type == "AverageValue"
    # KEDA's default.
    trigger = {"type": "prometheus", "metadata": {"threshold": "5"}}
    assert settings_of_scaled_object(changed(SCALED_OBJECT, triggers=[trigger])).target_type == "AverageValue"


def test_what_is_not_modelled_is_refused() -> None:
    two = HPA["spec"]["metrics"] * 2
    select = {"scaleUp": HPA["spec"]["behavior"]["scaleUp"] | {"selectPolicy": "Min"}}
    for wrong in (
        {"metrics": two},
        {"behavior": HPA["spec"]["behavior"] | select},
        {"minReplicas": 9},
        {"behavior": None},
    ):
        with pytest.raises(ManifestError):
            settings_of_hpa(changed(HPA, **wrong))
    trigger = SCALED_OBJECT["spec"]["triggers"][0]
    wrong_triggers: list[Any] = [
        trigger | {"metricType": "Utilization"},
        trigger | {"metadata": {"threshold": "0"}},
        {},
    ]
    for broken in wrong_triggers:
        with pytest.raises(ManifestError):
            settings_of_scaled_object(changed(SCALED_OBJECT, triggers=[broken]))
