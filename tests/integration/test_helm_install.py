"""Helm installs, upgrades and removes the chart: an API server's stand-in validates what it gets, and keeps it."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.processes.kubernetes_api import KubernetesApi, kubernetes_api
from tools import check_deploy
from tools.deploy_checks.kubectl import ensure_helm

SECRETS = "/api/v1/namespaces/pointsman/secrets"


def helm(api: KubernetesApi, home: Path, *words: str) -> str:
    """Run a command of Helm for the release; return what it says. Raises CalledProcessError."""
    chart = [] if words[0] == "uninstall" else [str(check_deploy.CHART), "--disable-openapi-validation"]
    done = subprocess.run(
        [ensure_helm(), words[0], "pointsman", *chart, "-n", "pointsman", "--kube-apiserver", api.url, *words[1:]],
        env={"HOME": str(home)}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout


def test_a_release_is_installed_upgraded_and_removed(tmp_path: Path) -> None:
    gpu, ha = (str(check_deploy.VALUES / f"{name}.yaml") for name in ("gpu", "ha"))
    with kubernetes_api() as api:
        said = helm(api, tmp_path, "install", "--values", gpu)
        assert "Not found: Secrets tokens, api-keys, redis-url, redis-users." in said
        assert api.names("Service") == {"router", "router-0", "gateway", "redis", "vllm"}
        assert api.names("PrometheusRule") == set()

        for name in ("tokens", "api-keys", "redis-url", "redis-users"):
            api.objects[f"{SECRETS}/{name}"] = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
        said = helm(api, tmp_path, "upgrade", "--values", ha)
        assert "Not found" not in said
        assert "router-1" in api.names("Service")
        assert api.names("PodDisruptionBudget") == {"router", "gateway", "vllm"}
        assert api.names("PrometheusRule") == {"pointsman"}

        helm(api, tmp_path, "uninstall")
        assert {o["kind"] for o in api.objects.values()} == {"Secret"}
        assert api.names("Secret") == {"tokens", "api-keys", "redis-url", "redis-users"}


def test_an_object_with_an_unknown_field_is_refused() -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "a"},
        "spec": {"ports": [{"port": 1}], "selectors": {}},
    }
    with kubernetes_api() as api:
        asked = urllib.request.Request(f"{api.url}/api/v1/namespaces/n/services", json.dumps(service).encode())
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=30)
        assert refused.value.code == 422
        assert "selectors" in json.load(refused.value)["message"]
        assert api.objects == {}
