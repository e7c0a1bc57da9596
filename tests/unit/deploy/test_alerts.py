"""Each alert fires alone and when it should, and none fires for a healthy fleet: promtool runs the rules over series."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import check_deploy

RULES = check_deploy.DEPLOY / "telemetry/rules/pointsman.yaml"
P = "pointsman_"
# A series of kube-state-metrics.
HPA = 'kube_horizontalpodautoscaler_status_condition{namespace="pointsman",horizontalpodautoscaler="vllm",'
# Half an hour in steps of 15 s: longer than any rule's window and its `for` time together.
STEPS, END = 120, "30m"

# A healthy fleet: values in promtool's notation, START+STEPxTIMES, or one constant number.
WELL: dict[str, str] = {
    'up{job="pointsman-router",replica="r0"}': "1",
    'up{job="pointsman-gateway",replica="g0"}': "1",
    'up{job="pointsman-agent",replica="n0"}': "1",
    P + 'router_ready{replica="r0"}': "1",
    P + 'router_store_degraded{replica="r0"}': "0",
    P + 'router_lost_replicas{replica="r0"}': "0",
    P + 'router_pool_owned{replica="r0",model="m"}': "1",
    P + 'router_pool_owned{replica="r1",model="m"}': "0",
    P + 'router_instances{replica="r0",model="m",state="READY"}': "2",
    P + 'router_instances{replica="r0",model="m",state="DRAINING"}': "0",
    P + 'router_instances{replica="r0",model="m",state="LOST"}': "0",
    P + 'router_instances{replica="r0",model="m",state="UNHEALTHY"}': "0",
    P + 'router_answering_instances{replica="r0",model="m"}': "2",
    P + 'router_report_age_seconds{replica="r0",instance="a"}': "1",
    P + 'router_wrong_kv_senders{replica="r0",instance="a"}': "0",
    P + 'router_resyncs_total{replica="r0"}': "1",
    P + 'router_prediction_audit_failures_total{replica="r0",instance="a"}': "0",
    P + 'router_predicted_cached_tokens_total{replica="r0"}': "0+20000",
    P + 'router_reported_cached_tokens_total{replica="r0"}': "0+19500",
    P + 'router_decisions_total{replica="r0",route_class="LIGHT",reason="session_affinity"}': "0+30",
    P + 'router_outcomes_total{replica="r0",outcome="OK"}': "0+30",
    P + 'router_refusals_total{replica="r0",code="RESOURCE_EXHAUSTED"}': "0",
    P + 'router_refusals_total{replica="r0",code="NOT_FOUND"}': "0+30",
    P + 'router_refusals_total{replica="r0",code="DEADLINE_EXCEEDED"}': "0+30",
    HPA + 'condition="ScalingActive",status="false"}': "0",
    HPA + 'condition="ScalingActive",status="true"}': "1",
    P + 'router_held_requests{replica="r0",model="m"}': "3",
    P + 'router_admission_armed{replica="r0",model="m"}': "0",
    P + 'router_waiting_requests{replica="r0",instance="a"}': "2",
    P + 'router_open_requests{replica="r0",instance="a"}': "640",
    P + 'router_reservations{replica="r0"}': "40",
    P + 'router_decide_seconds_bucket{replica="r0",le="0.001"}': "0+30",
    P + 'router_decide_seconds_bucket{replica="r0",le="0.05"}': "0+30",
    P + 'router_decide_seconds_bucket{replica="r0",le="+Inf"}': "0+30",
    P + 'router_offloads_total{replica="r0",outcome="OK"}': "0+1",
    P + 'router_offload_fallbacks_total{replica="r0"}': "0",
    P + 'router_lost_lines_total{replica="r0"}': "2",
    P + 'gateway_lost_lines_total{replica="g0"}': "0",
    P + 'agent_engine_up{replica="n0",engine="http://a"}': "1",
    P + 'agent_engine_address_ambiguous{replica="n0",engine="http://a"}': "0",
    P + 'agent_report_connected{replica="n0",instance="a",router="router:50051"}': "1",
    P + 'agent_kv_event_errors_total{replica="n0",instance="a",kind="lost"}': "0",
    P + 'agent_kv_event_errors_total{replica="n0",instance="a",kind="gaps"}': "0+1",
    P + 'gateway_router_connected{replica="g0"}': "1",
    P + 'gateway_tokenizer_exact{replica="g0",model="m"}': "1",
    P + 'gateway_degraded_placements_total{replica="g0"}': "3",
    P + 'gateway_open_requests{replica="g0"}': "41",
    P + 'gateway_prompt_tokens_mismatch_total{replica="g0",model="m"}': "0+1",
    P + 'gateway_prompt_tokens_mismatch_total{replica="g0",model="rare"}': "0",
    P + 'gateway_kv_releases_total{replica="g0",outcome="failed"}': "0",
    P + 'gateway_requests_total{replica="g0",model="m",route="/v1/chat/completions",status="200"}': "0+30",
    P + 'gateway_requests_total{replica="g0",model="m",route="/v1/chat/completions",status="502"}': "0",
    P + 'gateway_requests_total{replica="g0",model="rare",route="/v1/chat/completions",status="200"}': "0+1",
    P + 'gateway_requests_total{replica="g0",model="rare",route="/v1/embeddings",status="200"}': "0+20",
    P + 'gateway_requests_total{replica="g0",model="",route="/health",status="503"}': "0+30",
    P + 'gateway_requests_total{replica="g0",model="",route="/ping",status="503"}': "0+30",
    P + 'gateway_requests_total{replica="g0",model="",route="/load",status="200"}': "0+60",
    P + 'gateway_ttft_seconds_bucket{replica="g0",le="10.0"}': "0+30",
    P + 'gateway_ttft_seconds_bucket{replica="g0",le="60.0"}': "0+30",
    P + 'gateway_ttft_seconds_bucket{replica="g0",le="+Inf"}': "0+30",
    P + 'gateway_tpot_seconds_bucket{replica="g0",le="0.05"}': "0+30",
    P + 'gateway_tpot_seconds_bucket{replica="g0",le="0.5"}': "0+30",
    P + 'gateway_tpot_seconds_bucket{replica="g0",le="+Inf"}': "0+30",
}  # fmt: skip

# Alert -> the series that differ, each by a part of its name. With them, that alert fires and no other.
ILL: dict[str, dict[str, str]] = {
    "PointsmanRouterDown": {"pointsman-router": "0"},
    "PointsmanGatewayDown": {"pointsman-gateway": "0"},
    "PointsmanAgentDown": {"pointsman-agent": "0"},
    "PointsmanRouterNotReady": {"router_instances": "_x120"},
    "PointsmanStoreAway": {"store_degraded": "1"},
    "PointsmanRouterLost": {"lost_replicas": "1"},
    "PointsmanModelWithoutOwner": {"pool_owned": "0"},
    "PointsmanNoInstanceReady": {"answering_instances": "0"},
    "PointsmanInstanceUnhealthy": {'state="LOST"': "1"},
    "PointsmanEngineDown": {"engine_up": "0"},
    "PointsmanEngineAddressAmbiguous": {"engine_address_ambiguous": "1"},
    "PointsmanReportNotConnected": {"report_connected": "0"},
    "PointsmanReportsStale": {"report_age": "0+15"},
    "PointsmanResyncs": {"resyncs": "0+1"},
    "PointsmanKvEventsLost": {'kind="lost"': "0+1"},
    "PointsmanPredictionsTooHigh": {"reported_cached": "0+15000"},
    "PointsmanPredictionAuditFailed": {"prediction_audit_failures": "0x110 1x10"},
    "PointsmanWrongKv": {"wrong_kv_senders": "1"},
    "PointsmanPromptTokensMismatch": {'tokens_mismatch_total{replica="g0",model="rare"': "0+1"},
    "PointsmanTokenizerNotExact": {"tokenizer_exact": "0"},
    "PointsmanGatewayWithoutRouter": {"router_connected": "0"},
    "PointsmanDegradedPlacements": {"degraded_placements": "3+1"},
    "PointsmanErrors": {'status="502"': "0+2"},
    "PointsmanRefusals": {'code="RESOURCE_EXHAUSTED"': "0+3"},
    "PointsmanAutoscalerWithoutFigure": {'condition="ScalingActive",status="false"': "1"},
    "PointsmanRequestsHeld": {"held_requests": "40"},
    "PointsmanSessionsParked": {"admission_armed": "1"},
    "PointsmanEngineQueues": {"waiting_requests": "30"},
    "PointsmanTtftHigh": {'ttft_seconds_bucket{replica="g0",le="10.0"}': "0+20"},
    "PointsmanTpotHigh": {'tpot_seconds_bucket{replica="g0",le="0.05"}': "0+20"},
    "PointsmanPlacementSlow": {'decide_seconds_bucket{replica="r0",le="0.001"}': "0+20"},
    "PointsmanOffloadsFail": {"offload_fallbacks": "0x100 0+1x20"},
    "PointsmanKvReleasesFail": {'outcome="failed"': "0+1"},
    "PointsmanReservationsLeak": {"router_reservations": "90"},
    "PointsmanLogLinesLost": {"router_lost_lines": "2x118 3x2"},
}


def alerts() -> dict[str, dict[str, Any]]:
    """The alert rules by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def with_changes(changes: dict[str, str]) -> dict[str, str]:
    changed = dict(WELL)
    for part, values in changes.items():
        found = [name for name in WELL if part in name]
        assert found, f"no series is named like {part}"
        changed |= dict.fromkeys(found, values)
    return changed


def as_values(changes: str) -> str:
    if "x" in changes:
        return changes
    return f"{changes}x{STEPS}" if "+" in changes else f"{changes}+0x{STEPS}"


def case(name: str, changes: dict[str, str]) -> dict[str, Any]:
    """A test for promtool in which the alert `name` ("": none) fires and no other."""
    series = [
        {"series": name, "values": as_values(series_values)} for name, series_values in with_changes(changes).items()
    ]
    fired = [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name else []
    firing = 'clamp_max(count by (alertname) (ALERTS{alertstate="firing"}), 1)'
    expected = {"expr": firing, "eval_time": END, "exp_samples": fired}
    return {"name": name, "interval": "15s", "input_series": series, "promql_expr_test": [expected]}


def promtool(folder: Path, rules: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    file = folder / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}))
    return subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)


def test_every_alert_has_a_case_and_says_what_to_do() -> None:
    assert set(ILL) == set(alerts())
    for rule in alerts().values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "runbook"} == set(rule["annotations"])
        assert "\n" not in rule["annotations"]["runbook"]


def test_each_alert_fires_alone_and_none_when_all_is_well(tmp_path: Path) -> None:
    ended = promtool(tmp_path, RULES, [case("", {}), *(case(name, changes) for name, changes in ILL.items())])
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["PointsmanStoreAway", "PointsmanRefusals"])
def test_a_rule_that_cannot_fire_is_found(name: str, tmp_path: Path) -> None:
    """With another expression in one rule, promtool says which alert is missing: the tests above can fail."""
    broken = tmp_path / "rules.yaml"
    text = RULES.read_text()
    broken.write_text(
        re.sub(rf"(alert: {name}\n +expr:)(?: .\n(?: {{12}}.*\n)+| .*\n)", r"\1 vector(0) > 1" + "\n", text)
    )
    assert broken.read_text() != text
    ended = promtool(tmp_path, broken, [case(name, ILL[name])])
    assert ended.returncode != 0
    assert name in ended.stdout + ended.stderr
