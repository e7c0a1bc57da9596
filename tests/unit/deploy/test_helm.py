"""The Helm chart: it makes the objects that the overlays make, refuses values that cannot work, and says what is missing."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.docs import command_parsers
from tests.support.docs.shell_blocks import blocks_of
from tests.support.repository import REPOSITORY, VERSION
from tools import check_deploy
from tools.deploy_checks import helm, k8s

OVERLAYS = check_deploy.DEPLOY / "k8s/overlays"
CHART = check_deploy.CHART
VALUES = check_deploy.VALUES
TLS = {"tls": {"enabled": True}}
# Differences that are meant: a pattern of `helm.differences`, and the reason. See also helm.LEFT_TO_THE_USER.
MEANT = {
    r"ConfigMap/agent(-prefill|-decode)?: only in .*": "one ConfigMap of agents for both roles",
    r"StatefulSet/vllm-\w+ .*agent\.envFrom.*: 'agent-\w+' -> 'agent'": "the same",
    r"ConfigMap/engine-service: only in the overlay": "settings of existing engines are in one ConfigMap",
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
    [*((path.name, (), {}) for path in sorted(OVERLAYS.iterdir())), *check_deploy.COMPONENTS],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else value if isinstance(value, str) else "",
)
def test_chart_makes_what_the_overlay_makes(overlay: str, components: tuple[str, ...], values: dict[str, Any]) -> None:
    found = helm.differences(
        check_deploy.render(OVERLAYS / overlay, *components), helm.template(CHART, values_of(overlay), values)
    )
    assert [line for line in found if not any(re.fullmatch(pattern, line) for pattern in MEANT)] == []


def test_a_difference_is_told_with_its_place() -> None:
    overlay = helm.template(CHART, values_of("gpu"))
    changed = copy.deepcopy(overlay)
    assert helm.differences(overlay, changed) == []
    find(changed, "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"][0]["args"][1] = "--acl"
    find(changed, "Service", "vllm")["spec"]["ports"].pop()
    changed.remove(find(changed, "NetworkPolicy", "nobody"))
    find(changed, "ConfigMap", "engine-flags")["data"]["engine.yaml"] += "\nseed: 1\n"
    assert helm.differences(overlay, changed) == [
        "NetworkPolicy/nobody: only in the overlay",
        "ConfigMap/engine-flags .data.engine.yaml.seed: None -> 1",
        "Service/vllm .spec.ports.agent-metrics: {'name': 'agent-metrics', 'port': 9101, 'targetPort': 'agent-metrics'} -> None",
        "StatefulSet/redis .spec.template.spec.containers.redis.args.1: '--aclfile' -> '--acl'",
    ]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"engine": {}}, "'engine' not allowed"),
        ({"engines": {"gpus": 8}}, "'gpus' not allowed"),
        ({"engines": {"kind": "daemonset"}}, "/engines/kind"),
        ({"engines": {"prefill": {"model": "other"}}}, "'model' not allowed"),
        ({"router": {"settings": {"POINTSMAN_ROUTER_LOST_INSTANCE_S": 10}}}, "got number, want string"),
        ({"images": {"digests": {"router": "sha256:12"}}}, "/images/digests/router"),
        ({"router": {"replicas": 2}, "redis": {"kind": "none"}}, "router.replicas: two routers agree"),
        ({"engines": {"kind": "existing"}}, "engines.existing: set either addresses or service"),
        ({"engines": {"kind": "per-node", "kvTransfer": {"enabled": True}}}, "engines.kvTransfer: not with"),
        ({"engines": {"kind": "per-node", "autoscaling": {"by": "keda"}}}, "only engines of kind replicas"),
        ({"engines": {"servedModelName": "a/b", "autoscaling": {"by": "hpa"}}}, "a name with a slash"),
        ({"engines": {"kind": "per-node"}, "gatewayApi": {"enabled": True}}, "an InferencePool selects pods"),
        ({"ingress": {"enabled": True}}, "ingress.host: set the name"),
        ({"redis": {"sentinelMaster": "mymaster"}}, "redis.sentinelMaster, redis.cluster: only with"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(problem)):
        helm.template(CHART, values)


def test_a_pod_is_rolled_by_its_own_settings_alone() -> None:
    def rolled(values: dict[str, Any]) -> set[str]:
        """Names of the workloads whose pods differ from those without `values`."""
        pods = [
            {
                o["metadata"]["name"]: o["spec"]["template"]
                for o in helm.template(CHART, given)
                if o["kind"] in k8s.WORKLOADS
            }
            for given in ({}, values)
        ]
        return {name for name, pod in pods[1].items() if pod != pods[0][name]}

    assert rolled({"router": {"settings": {"POINTSMAN_ROUTER_LOG_LEVEL": "debug"}}}) == {"router"}
    assert rolled({"gateway": {"settings": {"POINTSMAN_GATEWAY_LOG_LEVEL": "debug"}}}) == {"gateway"}
    assert rolled({"engines": {"flags": {"seed": 1}}}) == {"vllm"}
    assert rolled({"router": {"replicas": 2}}) == {"router", "gateway", "vllm"}


def test_a_part_may_keep_its_image() -> None:
    digest = f"sha256:{'0' * 64}"
    images = {
        "registry": "reg.example.com:5000/llm/",
        "tag": "2",
        "tags": {"engine": "1"},
        "digests": {"agent": digest},
    }
    [pod] = [o for o in helm.template(CHART, {"images": images}) if o["kind"] == "StatefulSet" and "vllm" in str(o)]
    assert [c["image"] for c in pod["spec"]["template"]["spec"]["containers"]] == [
        "reg.example.com:5000/llm/pointsman-engine:1",
        f"reg.example.com:5000/llm/pointsman-agent:2@{digest}",
    ]


def test_an_instance_gets_the_gpus_of_all_its_ranks() -> None:
    given = {
        "engines": {
            "kind": "prefill-decode",
            "tensorParallelSize": 2,
            "prefill": {"flags": {"data-parallel-size": 4}},
            "decode": {"nodeSelector": {"pool": "decode"}, "flags": {"allowed-media-domains": None}},
        }
    }
    objects = helm.template(CHART, given)
    prefill, decode = (
        find(objects, "StatefulSet", f"vllm-{role}")["spec"]["template"]["spec"] for role in ("prefill", "decode")
    )
    assert prefill["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert decode["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == "2"
    assert "nodeSelector" not in prefill
    assert decode["nodeSelector"] == {"pool": "decode"}


def test_a_default_flag_can_be_left_out() -> None:
    given = {"engines": {"flags": {"tool-call-parser": None, "enable-auto-tool-choice": None}}}
    [flags] = [o["data"] for o in helm.template(CHART, given) if o["metadata"]["name"] == "engine-flags"]
    assert yaml.safe_load(flags["engine.yaml"]) == {"allowed-media-domains": ["media.invalid"]}


def examples() -> list[dict[str, Any]]:
    text = (CHART / "README.md").read_text().partition("\n## Examples\n")[2].partition("\n## ")[0]
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)]


@pytest.mark.parametrize("number", range(3))
def test_the_examples_pass_all_checks(number: int) -> None:
    assert len(examples()) == 3
    # The secrets are those of the overlay: with TLS, of the component, and with keys of cert-manager here.
    overlay, components = (("single-node", ()), ("ha", ("tls",)), ("external-engines", ()))[number]
    given = examples()[number]
    objects = helm.template(CHART, given)
    assert helm.lint(CHART, given) == []
    assert [line for item in objects for line in check_deploy.schema_problems(item)] == []
    others = helm.left_to_the_user(check_deploy.render(OVERLAYS / overlay, *components))
    for secret in (o for o in others if o["kind"] == "Secret"):
        renamed = {"cert.pem": "tls.crt", "key.pem": "tls.key", "ca.pem": "ca.crt"}
        secret["data"] = {renamed.get(key, key): value for key, value in secret["data"].items()}
        if secret["metadata"]["name"] == "redis-url":
            secret["data"]["sentinels"] = secret["data"]["url"]
    assert k8s.check([*others, *objects]) == []


def test_the_readme_makes_the_secrets_that_the_overlays_have() -> None:
    made = {}
    for command in (command for block in blocks_of(CHART / "README.md") for command in block.commands):
        assert command_parsers.problem(command) == ""
        if found := re.search(r"create secret generic (\S+) (.*)", command):
            files = re.findall(r"--from-file=(\S+)", found[2])
            made[found[1]] = {file.partition("=")[0].rpartition("/")[2] for file in files}
    # A token that only some models need, so no overlay has it.
    del made["hugging-face"]
    overlay = helm.left_to_the_user(check_deploy.render(OVERLAYS / "gateway-api", "tls", "two-routers"))
    assert made == {o["metadata"]["name"]: set(o["data"]) for o in overlay if o["kind"] == "Secret"}


def test_every_value_is_checked_and_used() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())

    def compare(path: str, part: dict[str, Any], values: dict[str, Any]) -> None:
        assert part["additionalProperties"] is False, path
        assert part["properties"].keys() - {"global"} == values.keys(), path
        for name, value in values.items():
            assert re.search(rf"[.\"]{name}\b", templates), f"{path}.{name}"
            below = part["properties"][name]
            if isinstance(value, dict) and "properties" in below and value:
                compare(f"{path}.{name}", below, value)

    compare("", schema, yaml.safe_load((CHART / "values.yaml").read_text()))


def test_two_namespaces_have_nothing_in_common() -> None:
    given = [values_of("external-engines"), {"engines": {"existing": {"addresses": [], "service": "models/vllm:8000"}}}]
    first, second = (
        {
            (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"])
            for o in helm.template(CHART, *given, namespace=ns)
        }
        for ns in ("llm-a", "llm-b")
    )
    assert len(first) == len(second)
    assert first & second == set()
    assert "pointsman" not in {namespace for _, namespace, _ in first}
    given = [{"engines": {"autoscaling": {"by": "keda"}}, "monitoring": {"enabled": True}}]
    scaled = {o["kind"]: o["spec"] for o in helm.template(CHART, *given, namespace="llm-a") if "spec" in o}
    assert 'namespace="llm-a"' in scaled["ScaledObject"]["triggers"][0]["metadata"]["query"]
    rules = str(scaled["PrometheusRule"])
    assert 'namespace="llm-a"' in rules
    assert not re.search(r'namespace="pointsman"|-n pointsman\b', rules)


def test_the_notes_say_what_is_missing() -> None:
    said = helm.notes(CHART, values_of("gpu"))
    assert "Not found: Secrets tokens, api-keys, redis-url, redis-users." in said
    assert "rollout status statefulset/vllm " in said
    assert "elastic" not in said
    # (overlay, policy) -> what is said of KV, which `auto` fetches but does not let producers compute.
    for overlay, policy, warning in (
        ("gpu", "auto", ""),
        ("gpu", "unified", "The policy unified transfers no KV"),
        ("prefill-decode", "elastic:decider=cost", ""),
        ("prefill-decode", "migrate", "Under the policy migrate the instances of engines.prefill get no requests"),
    ):
        given = {
            "router": {"settings": {"POINTSMAN_ROUTER_POLICY": policy}},
            "engines": {"kvTransfer": {"enabled": True}},
        }
        said = helm.notes(CHART, values_of(overlay), given, TLS)
        assert warning in said
        assert ("olicy" in said) is bool(warning), said
    assert "tls-agent" in said
    assert "statefulset/vllm-decode" in said
    said = helm.notes(CHART, values_of("gpu-per-node"))
    assert "enforce=privileged" in said
    assert len(said.splitlines()) < 15


def test_a_packaged_chart_has_the_rules_and_dashboards(tmp_path: Path) -> None:
    subprocess.run(["make", "chart", f"DIST={tmp_path}"], cwd=REPOSITORY, check=True, capture_output=True)
    [package] = tmp_path.iterdir()
    assert package.name == f"pointsman-{VERSION.replace('.dev', '-dev')}.tgz"
    assert helm.template(package, values_of("ha")) == helm.template(CHART, values_of("ha"))
    with tarfile.open(package) as archive:
        assert sorted(file.name for file in archive if file.isfile() and "telemetry" in file.name) == [
            "pointsman/telemetry/dashboards/pointsman-fleet.json",
            "pointsman/telemetry/dashboards/pointsman-requests.json",
            "pointsman/telemetry/prometheusrule.yaml",
        ]
