"""Engines are scaled on a metric that the router exports, by a query that Prometheus accepts, and it is the right workload."""

from __future__ import annotations

import copy
import re
import subprocess
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from pointsman_router.io.telemetry.event_metrics import EventMetrics
from pointsman_router.io.telemetry.state_metrics import StateCollector
from studies.autoscaling.horizontal_autoscaler import settings_of_hpa, settings_of_scaled_object
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


def rendered(component: str, model: str) -> list[dict[str, Any]]:
    """The rendered objects, with the model set as the README says."""
    file = "k8s/components/settings/engine.env"
    settings = re.sub(
        "(?m)^SERVED_MODEL_NAME=.*", f"SERVED_MODEL_NAME={model}", (check_deploy.DEPLOY / file).read_text()
    )
    return check_deploy.render(OVERLAYS / "single-node", component, files={file: settings})


def asked_model(component: str, objects: list[dict[str, Any]]) -> str:
    spec = scaler(objects, component)["spec"]
    if component == "autoscaling-hpa":
        return str(spec["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]["model"])
    [model] = re.findall('model="(.*?)"', spec["triggers"][0]["metadata"]["query"])
    return str(model)


@pytest.mark.parametrize("component", KINDS)
def test_the_model_that_engines_serve_is_the_one_asked_for(component: str) -> None:
    objects = rendered(component, "my-model")
    assert asked_model(component, objects) == "my-model"
    assert k8s.check(objects) == []
    broken = copy.deepcopy(objects)
    spec = scaler(broken, component)["spec"]
    renamed_spec = yaml.safe_load(yaml.safe_dump(spec).replace("my-model", "qwen3-coder"))
    scaler(broken, component)["spec"] = renamed_spec
    assert k8s.check(broken) == [
        f"{KINDS[component]}/vllm: asks for model qwen3-coder, and SERVED_MODEL_NAME is my-model"
    ]


def test_a_model_with_a_slash_is_scaled_by_keda_alone() -> None:
    assert k8s.check(rendered("autoscaling-keda", "org/model")) == []
    [problem] = k8s.check(rendered("autoscaling-hpa", "org/model"))
    assert "org/model cannot be a label's value" in problem


def test_a_query_of_another_namespace_is_a_problem() -> None:
    objects = rendered("autoscaling-keda", "m")
    scaler(objects, "autoscaling-keda")["metadata"]["namespace"] = "elsewhere"
    assert "ScaledObject/vllm: asks for namespace pointsman, and the routers are in elsewhere" in k8s.check(objects)


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
    telemetry.registry.register(StateCollector(fleet, lambda: True, clock=lambda: 0.0))
    join(fleet, "a", 1)
    assert f'{METRIC}{{model="m",' in generate_latest(telemetry.registry).decode()


def test_both_components_scale_alike_on_the_mean_of_a_minute() -> None:
    rendered = {name: check_deploy.render(OVERLAYS / "single-node", name) for name in KINDS}
    keda, hpa = (scaler(rendered[name], name) for name in ("autoscaling-keda", "autoscaling-hpa"))
    assert settings_of_scaled_object(keda) == settings_of_hpa(hpa)
    for query in (keda["spec"]["triggers"][0]["metadata"]["query"], adapter_rule()["metricsQuery"]):
        assert re.fullmatch(r"max by \(model\) \(avg_over_time\(.*\[1m\]\)\)", query)
