"""Engines are scaled on a metric that the router tells, by a query that Prometheus understands, and the right workload."""

from __future__ import annotations

import copy
import re
import subprocess
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from pointsman.lab.simulation.autoscaling.horizontal_autoscaler import settings_of_hpa, settings_of_scaled_object
from pointsman.router.io.telemetry.event_metrics import EventMetrics
from pointsman.router.io.telemetry.state_metrics import StateCollector
from tests.support.router_values import join, state
from tools import check_deploy
from tools.deploy_checks import k8s

OVERLAYS = check_deploy.DEPLOY / "k8s/overlays"
KINDS = {"autoscaling-keda": "ScaledObject", "autoscaling-hpa": "HorizontalPodAutoscaler"}
METRIC = "pointsman_router_backlog_seconds"


def scaler(objects: list[dict[str, Any]], component: str) -> dict[str, Any]:
    return next(o for o in objects if o["kind"] == KINDS[component] and o["metadata"]["name"] == "vllm")


def adapter_rule() -> dict[str, Any]:
    file = check_deploy.DEPLOY / "k8s/components/autoscaling-hpa/adapter-rule.yaml"
    [rule] = yaml.safe_load(file.read_text())["rules"]["external"]
    return dict(rule)


@pytest.mark.parametrize("component", KINDS)
def test_the_engines_are_scaled_and_have_no_count_of_their_own(component: str) -> None:
    objects = check_deploy.render(OVERLAYS / "single-node", component)
    assert [line for item in objects for line in check_deploy.schema_problems(item)] == []
    assert k8s.check(objects) == []
    found = scaler(objects, component)
    assert found["spec"]["scaleTargetRef"]["name"] == "vllm"
    broken = copy.deepcopy(objects)
    scaler(broken, component)["spec"]["scaleTargetRef"]["name"] = "engines"
    assert k8s.check(broken) == [f"{KINDS[component]}/vllm: no StatefulSet engines"]
    named = next(o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"].startswith("engine-"))
    assert named["data"]["SERVED_MODEL_NAME"] in yaml.safe_dump(found)


@pytest.mark.parametrize("component", KINDS)
def test_an_overlay_that_sets_the_count_itself_is_a_problem(component: str) -> None:
    [problem] = k8s.check(check_deploy.render(OVERLAYS / "gpu", component))
    assert problem.startswith(f"{KINDS[component]}/vllm: StatefulSet/vllm has replicas of its own")


def test_schema_of_keda_refuses_an_unknown_field() -> None:
    objects = check_deploy.render(OVERLAYS / "single-node", "autoscaling-keda")
    broken = copy.deepcopy(scaler(objects, "autoscaling-keda"))
    broken["spec"]["maxReplicas"] = 8
    [problem] = check_deploy.schema_problems(broken)
    assert "maxReplicas" in problem


def test_queries_are_understood_and_ask_for_what_the_router_tells() -> None:
    keda = scaler(check_deploy.render(OVERLAYS / "single-node", "autoscaling-keda"), "autoscaling-keda")
    rule = adapter_rule()
    asked = rule["metricsQuery"].replace("<<.Series>>", METRIC).replace("<<.LabelMatchers>>", 'model="m"')
    for query in (keda["spec"]["triggers"][0]["metadata"]["query"], asked):
        text = yaml.safe_dump({"groups": [{"name": "g", "rules": [{"record": "r", "expr": query}]}]})
        checked = subprocess.run(
            ["promtool", "check", "rules", "/dev/stdin"], input=text, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
        assert METRIC in query
    assert rule["seriesQuery"].startswith(METRIC)
    hpa = scaler(check_deploy.render(OVERLAYS / "single-node", "autoscaling-hpa"), "autoscaling-hpa")
    assert hpa["spec"]["metrics"][0]["external"]["metric"]["name"] == METRIC
    fleet, telemetry = state(), EventMetrics()
    telemetry.registry.register(StateCollector(fleet, lambda: True, lambda: 0.0))
    join(fleet, "a", 1)
    assert f'{METRIC}{{model="m",' in generate_latest(telemetry.registry).decode()


def test_both_components_scale_alike_on_the_mean_of_a_minute() -> None:
    rendered = {name: check_deploy.render(OVERLAYS / "single-node", name) for name in KINDS}
    keda, hpa = (scaler(rendered[name], name) for name in ("autoscaling-keda", "autoscaling-hpa"))
    assert settings_of_scaled_object(keda) == settings_of_hpa(hpa)
    for query in (keda["spec"]["triggers"][0]["metadata"]["query"], adapter_rule()["metricsQuery"]):
        assert re.fullmatch(r"max by \(model\) \(avg_over_time\(.*\[1m\]\)\)", query)
