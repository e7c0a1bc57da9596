"""The Helm chart: it makes the objects that the overlays make, refuses values that cannot work, and says what is missing."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import VERSION
from tools import check_deploy
from tools.deploy_checks import helm, k8s
from tools.deploy_checks.kubectl import ensure_helm

OVERLAYS = check_deploy.DEPLOY / "k8s/overlays"
CHART = check_deploy.CHART
VALUES = check_deploy.VALUES
HOST = {"ingress": {"enabled": True, "host": "llm.example.com"}}
TLS = {"tls": {"enabled": True}}
# Overlay, components added to it, and the values that do the same, after those of the overlay's file.
COMPONENTS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("ha", ("external-redis", "tls", "ingress"), {"redis": {"kind": "external"}, **TLS, **HOST}),
    ("gateway-api", ("tls", "two-routers"), {"router": {"replicas": 2}, **TLS}),
    (
        "external-engines",
        ("engine-service", "tls", "monitoring"),
        {"engines": {"existing": {"addresses": [], "service": "models/vllm:8000"}}, "monitoring": {"enabled": True}, **TLS},
    ),
    ("gpu-per-node", ("tls", "nvidia-runtime"), {"engines": {"runtimeClassName": "nvidia"}, **TLS}),
    ("gpu", ("kv-transfer", "rdma"), {"engines": {"kvTransfer": {"enabled": True, "protocol": "rdma"}}}),
    ("single-node", ("autoscaling-keda",), {"engines": {"autoscaling": {"by": "keda"}}}),
    ("single-node", ("autoscaling-hpa",), {"engines": {"autoscaling": {"by": "hpa"}}}),
]
# Differences that are meant: a pattern of `helm.differences`, and the reason. See also helm.LEFT_TO_THE_USER.
MEANT = {
    r"ConfigMap/agent(-prefill|-decode)?: only in .*": "one ConfigMap of agents for both roles",
    r"StatefulSet/vllm-\w+ .*agent\.envFrom.*: 'agent-\w+' -> 'agent'": "the same",
    r"ConfigMap/engine-service: only in the overlay": "settings of existing engines are in one ConfigMap, without those that another replaces",
    r"ConfigMap/engines .*POINTSMAN_AGENT_ENGINE(S|_SERVICES): .*": "the same",
    r"Deployment/agent .*envFrom\.2: .*'engine-service'.* -> None": "the same",
}


def values_of(overlay: str) -> dict[str, Any]:
    return dict(yaml.safe_load((VALUES / f"{overlay}.yaml").read_text()))


def find(objects: list[helm.Object], kind: str, name: str) -> helm.Object:
    return next(o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name))


def test_each_overlay_has_a_file_of_values() -> None:
    assert {path.stem for path in VALUES.iterdir()} == {path.name for path in OVERLAYS.iterdir()}


@pytest.mark.parametrize(
    ("overlay", "components", "values"),
    [*((path.name, (), {}) for path in sorted(OVERLAYS.iterdir())), *COMPONENTS],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else value if isinstance(value, str) else "",
)
def test_chart_makes_what_the_overlay_makes(overlay: str, components: tuple[str, ...], values: dict[str, Any]) -> None:
    found = helm.differences(
        check_deploy.render(OVERLAYS / overlay, *components), helm.template(CHART, values_of(overlay), values)
    )
    assert [line for line in found if not any(re.fullmatch(pattern, line) for pattern in MEANT)] == []
