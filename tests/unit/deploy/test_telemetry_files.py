"""Prometheus' configuration and the dashboards pass, and mistakes in copies of them are refused with a line that names them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import check_deploy

COMPOSE = check_deploy.DEPLOY / "compose/compose.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(check_deploy.CHART / "telemetry", tmp_path / "helm/pointsman/telemetry")
    return Path(shutil.copytree(check_deploy.DEPLOY / "telemetry", tmp_path / "telemetry"))


def test_telemetry_is_sound(folder: Path) -> None:
    assert check_deploy.check_telemetry(folder, COMPOSE) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "expected"),
    [
        ("prometheus.yaml", "router:9100", "route:9100", "pointsman-router: route is no service"),
        ("prometheus.yaml", "agent:9101", "agent:9100", "pointsman-agent: agent does not listen on 9100"),
        ("prometheus.yaml", "agent:9101", "vllm-0:8000", "pointsman-agent: vllm-0:8000 is on no network of prometheus"),
        ("prometheus.yaml", "honor_labels", "honour_labels", "honour_labels"),
        ("rules/pointsman.yaml", "expr: up{", "expr: up{{", "pointsman.yaml"),
        ("rules/pointsman.yaml", "{{ $labels.replica }}", "{{ .labels.replica }", "pointsman.yaml"),
        ("grafana/dashboards/pointsman-fleet.json", "_keys", "_key", "pointsman-fleet.json is not what"),
        (
            "../helm/pointsman/telemetry/prometheusrule.yaml",
            "for: ",
            "for:  ",
            "telemetry/prometheusrule.yaml is not what",
        ),
    ],
)
def test_mistake_is_refused(folder: Path, file: str, before: str, after: str, expected: str) -> None:
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after, 1))
    problems = check_deploy.check_telemetry(folder, COMPOSE)
    assert any(expected in line for line in problems), problems
    assert all("\n" not in line for line in problems)
