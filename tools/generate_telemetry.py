"""Writes the generated files of deploy/telemetry: Grafana dashboards, alert rules for Kubernetes, Prometheus' configuration for
TLS; and copies of dashboards and rules for the Helm chart, which can read only files of its own folder.

    .venv/bin/python -m tools.generate_telemetry

The dashboards are generated from the panels listed here. The generated files are checked in; tools/check_deploy.py compares them
with this program's output.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "deploy/telemetry"
RULES = "rules/pointsman.yaml"
CHART = "../helm/pointsman/telemetry"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
R, G, A = "pointsman_router_", "pointsman_gateway_", "pointsman_agent_"


@dataclass(frozen=True)
class Panel:
    """A graph. `queries`: PromQL expression -> legend. `unit`: Grafana's name of the unit."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    about: str = ""
    stacked: bool = False


def quantiles(metric: str, by: str = "") -> dict[str, str]:
    """Return queries of a histogram's p50, p90 and p99, or with `by` of its p90 for each value of that label."""
    shares = (0.9,) if by else (0.5, 0.9, 0.99)
    labels, legend = (f"le, {by}", f"{{{{{by}}}}} ") if by else ("le", "")
    return {
        f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))": f"{legend}p{share * 100:.0f}"
        for share in shares
    }


def rates(metric: str, by: str, matching: str = "") -> dict[str, str]:
    """Return a query of a counter's increase per second by a label."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return {f"sum by ({by}) (rate({metric}{matching}[$__rate_interval]))": legend}


REQUESTS = [
    Panel("Answers by status", rates(f"{G}requests_total", "status"), "reqps", stacked=True),
    Panel("Time to the first token", quantiles(f"{G}ttft_seconds"), "s", "From the request's last byte to the answer's first."),
    Panel("Time per output token", quantiles(f"{G}tpot_seconds"), "s", "Streams, after their first token."),
    Panel("Time to the first token by class, p90", quantiles(f"{R}ttft_seconds", "route_class"), "s"),
    Panel("Wait of gateways for placement", quantiles(f"{G}place_seconds"), "s", "Includes the time that requests were held."),
    Panel("Deciding and reserving", quantiles(f"{R}decide_seconds"), "s"),
    Panel("Decisions by class", rates(f"{R}decisions_total", "route_class"), "reqps", stacked=True),
    Panel("Decisions by reason", rates(f"{R}decisions_total", "reason"), "reqps", stacked=True),
    Panel("Refusals by code", rates(f"{R}refusals_total", "code"), "reqps"),
    Panel(
        "Held requests by priority",
        {f"sum by (model, priority) ({R}held_requests)": "{{model}} {{priority}}"},
        about="In the routers' queues.",
    ),
    Panel(
        "Parked sessions by priority",
        {f"sum by (model, priority) ({R}parked_requests)": "{{model}} {{priority}}"},
        about="First requests of new sessions that wait until the caches have room.",
    ),
    Panel(
        "Tokens of sessions under way",
        {
            f"sum by (model) ({R}session_tokens)": "{{model}}: sessions, each by its chance to return soon",
            f"sum by (model) ({R}session_capacity_tokens)": "{{model}}: caches",
        },
        about="New sessions are parked while sessions exceed the caches and evict each other.",
    ),
    Panel("Time held by priority, p90", quantiles(f"{R}held_seconds", "priority"), "s", "Of requests that were held."),
    Panel(
        "Open requests",
        {f"sum({R}reservations)": "reserved by routers", f"sum({G}open_requests)": "open at gateways"},
        about="The two should be equal; a lasting excess of reservations is a leak.",
    ),
    Panel(
        "Cached tokens",
        {
            f"sum(rate({R}predicted_cached_tokens_total[$__rate_interval]))": "predicted",
            f"sum(rate({R}reported_cached_tokens_total[$__rate_interval]))": "reported by engines",
        },
        about="Tokens per second, of answers whose engine reported its cached tokens.",
    ),
    Panel("Offloads by outcome", rates(f"{R}offloads_total", "outcome"), "reqps", stacked=True),
    Panel(
        "Offload fallbacks",
        {f"sum(rate({R}offload_fallbacks_total[$__rate_interval]))": "answered by one instance alone"},
        "reqps",
    ),
    Panel("Attempts by outcome", rates(f"{G}attempts_total", "outcome"), "reqps", stacked=True),
    Panel(
        "Placed without a router",
        {f"sum by (replica) (rate({G}degraded_placements_total[$__rate_interval]))": "{{replica}}"},
        "reqps",
    ),
    Panel("Tokenising", quantiles(f"{G}tokenize_seconds"), "s", "Template, tokens and block keys."),
]  # fmt: skip

FLEET = [
    Panel("Instances by state", {f"sum by (state) (max by (model, state) ({R}instances))": "{{state}}"}, stacked=True),
    Panel("Open sequences", {f"sum by (instance) ({R}open_requests)": "{{instance}}"}),
    Panel("Prefill backlog", {f"sum by (instance) ({R}pending_prefill_tokens)": "{{instance}}"}, about="Tokens."),
    Panel("Running requests (engines)", {f"max by (instance) ({R}running_requests)": "{{instance}}"}),
    Panel("Waiting requests (engines)", {f"max by (instance) ({R}waiting_requests)": "{{instance}}"}),
    Panel("KV blocks in use", {f"max by (instance) ({R}kv_usage_ratio)": "{{instance}}"}, "percentunit"),
    Panel("Placements by instance", rates(f"{R}placements_total", "instance"), "reqps", stacked=True),
    Panel("Block keys in the index", {f"max by (instance) ({R}keys)": "{{instance}}"}, about="16 tokens each."),
    Panel("Approximate block keys", {f"max by (instance) ({R}approximate_keys)": "{{instance}}"}, about="Without KV events."),
    Panel(
        "Samples of the prefill curves",
        {f"max by (model, hardware) ({R}prefill_curve_samples)": "{{model}} {{hardware}}"},
        about="TTFT deadlines are predicted from 50 samples on. Streamed answers are sampled; a new owner starts from 0.",
    ),
    Panel("Report age", {f"min by (instance) ({R}report_age_seconds)": "{{instance}}"}, "s", "Since the agent's last report."),
    Panel("Snapshot requests", rates(f"{R}resyncs_total", "replica"), "cps"),
    Panel(
        "Failed prediction audits",
        {f"sum by (instance) (increase({R}prediction_audit_failures_total[1h]))": "{{instance}}"},
        about="In the last hour.",
    ),
    Panel("KV-event batches", rates(f"{A}event_batches_total", "instance"), "cps"),
    Panel("KV-event errors", rates(f"{A}kv_event_errors_total", "instance, kind"), "cps"),
    Panel("Engines that answer", {f"sum({A}engine_up)": "up", f"count({A}engine_up)": "known"}),
    Panel("Routers that are ready", {f"{R}ready": "{{replica}}"}),
    Panel("Models owned", {f"sum by (replica) ({R}pool_owned)": "{{replica}}"}),
    Panel("Store unreachable", {f"{R}store_degraded": "{{replica}}"}, about="1 while Redis cannot be reached."),
]  # fmt: skip

DASHBOARDS = {
    "pointsman-requests": ("Pointsman: requests", REQUESTS),
    "pointsman-fleet": ("Pointsman: fleet", FLEET),
}


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON model; the viewer chooses the data source."""
    return {
        "uid": uid,
        "title": title,
        "schemaVersion": 39,
        "tags": ["pointsman"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }  # fmt: skip


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    row, column = divmod(number, COLUMNS)
    custom = {"drawStyle": "line", "fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend, "datasource": source}
            for place, (expression, legend) in enumerate(panel.queries.items())
        ],
    }  # fmt: skip


def prometheus_rule(rules: str) -> str:
    """Convert the text of a rule file to that of a PrometheusRule of the Prometheus operator."""
    body = "".join(f"  {line}" if line.strip() else line for line in rules[rules.index("groups:") :].splitlines(True))
    return (
        "# Written by tools/generate_telemetry.py from rules/pointsman.yaml.\napiVersion: monitoring.coreos.com/v1\n"
        f"kind: PrometheusRule\nmetadata:\n  name: pointsman\nspec:\n{body}"
    )


def with_tls(prometheus: str) -> str:
    """Convert the text of prometheus.yaml for a gateway with TLS (deploy/compose/tls.yaml)."""
    job = "  - job_name: pointsman-gateway\n"
    assert job in prometheus
    body = prometheus[prometheus.index("global:") :]
    return "# Written by tools/generate_telemetry.py from prometheus.yaml: the gateway speaks TLS.\n" + body.replace(
        job, f"{job}    scheme: https\n    tls_config: {{ca_file: /run/tls/ca.pem}}\n"
    )


def written(folder: Path = FOLDER) -> dict[str, str]:
    """Return path under `folder` -> content of every generated file."""
    dashboards = {
        f"dashboards/{uid}.json": json.dumps(dashboard(uid, title, panels), indent=1) + "\n"
        for uid, (title, panels) in DASHBOARDS.items()
    }
    rule = prometheus_rule((folder / RULES).read_text())
    return {
        **{f"grafana/{path}": content for path, content in dashboards.items()},
        **{f"{CHART}/{path}": content for path, content in dashboards.items()},
        "prometheusrule.yaml": rule,
        f"{CHART}/prometheusrule.yaml": rule,
        "prometheus.tls.yaml": with_tls((folder / "prometheus.yaml").read_text()),
    }


if __name__ == "__main__":
    for path, content in written().items():
        (FOLDER / path).write_text(content)
