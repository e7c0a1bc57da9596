"""The manifests pass, and each kind of mistake in a copy of them is refused with a line that names it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from pointsman_gateway.core.api.api_call import ROUTES
from tests.support.repository import VERSION
from tools import check_deploy
from tools.deploy_checks import k8s

Objects = list[dict[str, Any]]


OVERLAYS = check_deploy.DEPLOY / "k8s/overlays"


@pytest.fixture(scope="module")
def rendered() -> Objects:
    return check_deploy.render(OVERLAYS / "ha")


def find(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    """The object `name` of `kind`; generated names carry a hash."""
    return next(
        o for o in objects if o["kind"] == kind and re.fullmatch(rf"{name}(-[0-9a-z]{{10}})?", o["metadata"]["name"])
    )


def pod(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = find(objects, kind, name)["spec"]["template"]["spec"]
    return spec


def workloads(objects: Objects) -> dict[str, str]:
    """Workload -> the containers of its pods."""
    found = [o for o in objects if o["kind"] in k8s.WORKLOADS]
    return {
        f"{o['kind']}/{o['metadata']['name']}": " ".join(
            sorted(c["name"] for c in o["spec"]["template"]["spec"]["containers"])
        )
        for o in found
    }


ROUTER = {"StatefulSet/router": "router", "Deployment/gateway": "gateway"}
REDIS = {"StatefulSet/redis": "redis"}
SIDECAR = {"StatefulSet/vllm": "agent vllm"}
PER_NODE = {"DaemonSet/vllm": "vllm", "DaemonSet/agent": "agent"}
# Their names have a hash of their content, so that each change leaves the old ones behind.
MADE_ANEW = ("ConfigMap", "Secret")


@pytest.mark.parametrize(
    ("overlay", "components", "expected"),
    [
        ("single-node", (), ROUTER | SIDECAR),
        ("gpu", (), ROUTER | REDIS | SIDECAR),
        ("gpu", ("kv-transfer", "rdma"), ROUTER | REDIS | SIDECAR),
        ("ha", ("ingress",), ROUTER | REDIS | SIDECAR),
        (
            "prefill-decode",
            (),
            ROUTER | REDIS | {"StatefulSet/vllm-prefill": "agent vllm", "StatefulSet/vllm-decode": "agent vllm"},
        ),
        ("gpu-per-node", (), ROUTER | REDIS | PER_NODE),
        ("gpu-per-node", ("two-routers",), ROUTER | REDIS | PER_NODE),
        ("ha", (), ROUTER | REDIS | SIDECAR),
        ("ha", ("external-redis",), ROUTER | SIDECAR),
        ("ha", ("tls",), ROUTER | REDIS | SIDECAR),
        ("gpu-per-node", ("tls",), ROUTER | REDIS | PER_NODE),
        ("gateway-api", (), ROUTER | REDIS | SIDECAR),
        ("gateway-api", ("two-routers", "tls"), ROUTER | REDIS | SIDECAR),
        ("external-engines", (), ROUTER | REDIS | {"Deployment/agent": "agent"}),
        ("external-engines", ("engine-service",), ROUTER | REDIS | {"Deployment/agent": "agent"}),
        ("external-engines", ("two-routers", "monitoring"), ROUTER | REDIS | {"Deployment/agent": "agent"}),
    ],
)
def test_overlays_are_sound(overlay: str, components: tuple[str, ...], expected: dict[str, str]) -> None:
    objects = check_deploy.render(OVERLAYS / overlay, *components)
    assert [line for item in objects for line in check_deploy.schema_problems(item)] == []
    assert k8s.check(objects) == []
    assert workloads(objects) == expected
    router = pod(objects, "StatefulSet", "router")["containers"][0]
    assert ("POINTSMAN_ROUTER_REDIS_URL" in {entry["name"] for entry in router["env"]}) is (overlay != "single-node")


@pytest.mark.parametrize(
    ("overlay", "kind", "count"), [("single-node", "StatefulSet", "1"), ("gpu-per-node", "DaemonSet", "8")]
)
def test_engines_get_the_gpus_that_they_split_the_model_over(overlay: str, kind: str, count: str) -> None:
    objects = check_deploy.render(OVERLAYS / overlay)
    assert find(objects, "ConfigMap", "engine")["data"]["TENSOR_PARALLEL_SIZE"] == count
    spec = pod(objects, kind, "vllm")
    resources = next(container for container in spec["containers"] if container["name"] == "vllm")["resources"]
    assert {resources[name]["nvidia.com/gpu"] for name in ("requests", "limits")} == {count}
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
    assert (spec.get("runtimeClassName") == "nvidia") is (overlay == "single-node"), (
        "k3s' default runtime shows no GPUs"
    )


def test_a_size_that_is_patched_for_one_role_is_followed_by_its_gpus() -> None:
    file = "k8s/overlays/prefill-decode/prefill/kustomization.yaml"
    patch = "path: /data/KV_ROLE, value: kv_producer}"
    text = (check_deploy.DEPLOY / file).read_text()
    assert patch in text
    more = f'{patch}\n      - {{op: replace, path: /data/TENSOR_PARALLEL_SIZE, value: "2"}}'
    objects = check_deploy.render(OVERLAYS / "prefill-decode", files={file: text.replace(patch, more)})
    for role, count in (("prefill", "2"), ("decode", "1")):
        found = {c.spec["name"]: c.spec for c in k8s.containers(find(objects, "StatefulSet", f"vllm-{role}"))}
        assert found["vllm"]["resources"]["limits"]["nvidia.com/gpu"] == count
    assert k8s.check(objects) == []
    engine = pod(objects, "StatefulSet", "vllm-decode")["containers"]
    next(container for container in engine if container["name"] == "vllm")["resources"]["limits"]["nvidia.com/gpu"] = (
        "4"
    )
    (problem,) = k8s.check(objects)
    assert problem.endswith("limits 4 GPUs, and TENSOR_PARALLEL_SIZE is 1")


def test_a_data_parallel_engine_needs_gpus_for_each_rank() -> None:
    file = "k8s/components/settings/engine.yaml"
    text = (check_deploy.DEPLOY / file).read_text()
    objects = check_deploy.render(OVERLAYS / "gpu", files={file: f"{text}data-parallel-size: 2\n"})
    problems = k8s.check(objects)
    assert len(problems) == 2
    assert problems[0].endswith("requests 1 GPUs, and TENSOR_PARALLEL_SIZE is 1 for each of 2 data-parallel ranks")
    engine = next(
        container for container in pod(objects, "StatefulSet", "vllm")["containers"] if container["name"] == "vllm"
    )
    for kind in ("requests", "limits"):
        engine["resources"][kind]["nvidia.com/gpu"] = "2"
    assert k8s.check(objects) == []
    engine["args"].append("--data-parallel-size=1")
    assert len(k8s.check(objects)) == 2


def test_one_rank_on_each_gpu_of_a_node_takes_the_patches_of_the_page() -> None:
    page = (check_deploy.DEPLOY / "README.md").read_text()
    (patches,) = re.findall(r"^```yaml\n(patches:\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    overlay, flags = "k8s/overlays/gpu-per-node/kustomization.yaml", "k8s/components/settings/engine.yaml"
    texts = {file: (check_deploy.DEPLOY / file).read_text() for file in (overlay, flags)}
    ranks = f"{texts[flags]}data-parallel-size: 8\nenable-expert-parallel: true\n"
    objects = check_deploy.render(OVERLAYS / "gpu-per-node", files={overlay: texts[overlay] + patches, flags: ranks})
    assert [line for item in objects for line in check_deploy.schema_problems(item)] == []
    assert k8s.check(objects) == []
    spec = pod(objects, "DaemonSet", "vllm")
    assert find(objects, "ConfigMap", "engine")["data"]["TENSOR_PARALLEL_SIZE"] == "1"
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "1Ti", "nvidia.com/gpu": "8"}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    claim = volumes["models"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}


def test_kv_transfer_without_the_engines_that_it_patches_is_refused() -> None:
    problems = k8s.check(check_deploy.render(OVERLAYS / "gpu-per-node", "kv-transfer"))
    assert "NetworkPolicy/kv-transfer: port bootstrap is not a port of what it selects" in problems


def test_an_agent_reaches_the_events_of_all_ranks_of_its_node() -> None:
    objects = check_deploy.render(OVERLAYS / "gpu-per-node")
    offered = {port["port"] for port in find(objects, "Service", "vllm-node")["spec"]["ports"]}
    admitted = find(objects, "NetworkPolicy", "vllm")["spec"]["ingress"][1]["ports"]
    ranks = int(find(objects, "ConfigMap", "engine")["data"]["TENSOR_PARALLEL_SIZE"])
    for first in (5557, 5657):
        assert set(range(first, first + ranks)) <= offered
        assert {"port": first, "protocol": "TCP", "endPort": first + ranks - 1} in [
            {"protocol": "TCP", **port} for port in admitted
        ]


@pytest.mark.parametrize(
    ("overlay", "names"),
    [
        ("single-node", {"vllm"}),
        ("gpu", {"vllm"}),
        ("ha", {"vllm"}),
        ("prefill-decode", {"vllm-prefill", "vllm-decode"}),
        ("gpu-per-node", {"vllm"}),
    ],
)
def test_engines_push_their_steps_to_where_their_agent_listens(overlay: str, names: set[str]) -> None:
    objects = check_deploy.render(OVERLAYS / overlay)
    found = {c.where: c for o in objects if o["kind"] in k8s.WORKLOADS for c in k8s.containers(o)}
    engines = {where: c for where, c in found.items() if c.spec["name"] == "vllm"}
    assert {where.split("/")[1] for where in engines} == names
    for where, engine in engines.items():
        beside = found.get(where.removesuffix("/vllm") + "/agent") or found["DaemonSet/agent/agent"]
        environment = k8s.environment(beside, objects)[0]
        pushed_to = k8s.environment(engine, objects)[0]["POINTSMAN_AGENT_LOADS"]
        if overlay != "gpu-per-node":
            assert pushed_to == environment["POINTSMAN_AGENT_STEP_LOADS_LISTEN"] == "ipc:///run/kv/loads"
            assert environment["POINTSMAN_AGENT_ENDS_WITH_ENGINES"] == "true", "both are stopped at the same time"
            folders = [
                {m["mountPath"]: m["name"] for m in container.spec["volumeMounts"]} for container in (engine, beside)
            ]
            assert folders[0]["/run/kv"] == folders[1]["/run/kv"], "one folder for both"
        else:
            service = find(objects, "Service", "agent-node")["spec"]
            assert service["internalTrafficPolicy"] == "Local", "the agent of its own node"
            assert pushed_to == f"tcp://agent-node:{service['ports'][0]['port']}"
            assert environment["POINTSMAN_AGENT_STEP_LOADS_LISTEN"] == "tcp://0.0.0.0:9108"
            assert "POINTSMAN_AGENT_ENDS_WITH_ENGINES" not in environment, "it may be replaced alone"
            admitted = find(objects, "NetworkPolicy", "agent")["spec"]["ingress"]
            engine_pods = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "vllm"}}}
            assert {"from": [engine_pods], "ports": [{"port": "loads"}]} in admitted
        assert "threshold" not in environment["POINTSMAN_AGENT_ENGINES"], "the engine announces it"


def test_an_agent_may_name_engines_of_another_namespace_and_only_known_ones_of_its_own() -> None:
    objects = check_deploy.render(OVERLAYS / "external-engines")
    assert not [o for o in objects if "MODEL" in o.get("data", {})], "there is no engine that reads it"
    settings = find(objects, "ConfigMap", "engines")["data"]
    own = "http://vllm-0.vllm.pointsman.svc:8000"
    settings["POINTSMAN_AGENT_ENGINES"] += f" {own}"
    (problem,) = k8s.check(objects)
    assert problem.endswith("POINTSMAN_AGENT_ENGINES: nothing here serves vllm-0.vllm.pointsman.svc:8000")
    settings["POINTSMAN_AGENT_ENGINES"] = "http://10.0.0.7:8000 http://[fd00::7]:8000 http://vllm.models.svc:8000"
    assert k8s.check(objects) == []
    settings["POINTSMAN_AGENT_ENGINES"] = "http://vllm:8000"
    assert len(k8s.check(objects)) == 1


def test_the_policy_for_engines_elsewhere_admits_who_calls_them() -> None:
    page = (check_deploy.ROOT / "docs/existing_vllm.md").read_text()
    (block,) = re.findall(r"^ +```yaml\n(.*?)^ +```", page, re.DOTALL | re.MULTILINE)
    policy = yaml.safe_load(block)
    assert check_deploy.schema_problems(policy) == []
    objects = check_deploy.render(OVERLAYS / "external-engines")
    labels = {
        o["metadata"]["name"]: o["spec"]["template"]["metadata"]["labels"]
        for o in objects
        if o["kind"] in k8s.WORKLOADS
    }
    called, events = policy["spec"]["ingress"]
    for rule in (called, events):
        (peer,) = rule["from"]
        namespace = peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        assert namespace == find(objects, "Namespace", "pointsman")["metadata"]["name"]
    (names,) = called["from"][0]["podSelector"]["matchExpressions"]
    assert {labels[who]["app.kubernetes.io/name"] for who in ("gateway", "router", "agent")} == set(names["values"])
    assert events["from"][0]["podSelector"]["matchLabels"].items() <= labels["agent"].items()


def test_deployments_in_two_namespaces_have_nothing_in_common() -> None:
    file = "k8s/overlays/external-engines/kustomization.yaml"
    text = (check_deploy.DEPLOY / file).read_text()
    overlay, components = OVERLAYS / "external-engines", ("engine-service", "two-routers", "monitoring", "tls")
    first = check_deploy.render(overlay, *components)
    other = text.replace("namespace: pointsman\n", "namespace: llm-b\n")
    second = check_deploy.render(overlay, *components, files={file: other})
    assert k8s.check(second) == []
    made = [
        {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in each} for each in (first, second)
    ]
    assert len(made[0]) == len(made[1])
    assert made[0] & made[1] == set()
    [binding] = [o for o in second if o["kind"] == "ClusterRoleBinding"]
    assert (binding["roleRef"]["name"], binding["subjects"][0]["namespace"]) == ("llm-b-agent", "llm-b")
    assert [problem for problem in k8s.check([*first, binding]) if "ClusterRole" in problem] == [
        "ClusterRoleBinding/llm-b-agent: its name does not begin with the namespace (pointsman)",
        "ClusterRoleBinding/llm-b-agent: no ClusterRole llm-b-agent",
    ]


@pytest.mark.parametrize("name", ["api-keys", "tokens", "tls-router", "tls-gateway", "tls-agent", "tls-picker"])
def test_what_is_read_again_in_place_rolls_nothing(name: str) -> None:
    objects = check_deploy.render(OVERLAYS / "gateway-api", "two-routers", "tls")
    assert find(objects, "Secret", name)["metadata"]["name"] == name


def test_prefill_and_decode_instances_reach_each_other_and_know_their_side() -> None:
    objects = check_deploy.render(OVERLAYS / "prefill-decode")
    for role, side in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        found = {c.spec["name"]: c for c in k8s.containers(find(objects, "StatefulSet", f"vllm-{role}"))}
        assert k8s.environment(found["vllm"], objects)[0]["KV_ROLE"] == side
        engines = k8s.environment(found["agent"], objects)[0]["POINTSMAN_AGENT_ENGINES"]
        assert f"advertise=http://pod-name.vllm-{role}.pod-namespace.svc:8000" in engines
        # Each role's objects must select the pods of that role only.
        service = find(objects, "Service", f"vllm-{role}")["spec"]["selector"]
        workload = find(objects, "StatefulSet", f"vllm-{role}")["spec"]
        assert service == workload["selector"]["matchLabels"]
        assert service["pointsman/kv-role"] == role
        among, asked = find(objects, "NetworkPolicy", f"kv-transfer-{role}")["spec"]["ingress"]
        # The engines of both roles.
        assert among["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "vllm"}}}]
        assert {"port": "bootstrap"} in among["ports"]
        assert asked["ports"] == [{"port": "bootstrap"}]
    assert find(objects, "ConfigMap", "router")["data"]["POINTSMAN_ROUTER_POLICY"] == "elastic"


def test_the_page_names_all_that_a_change_to_prefill_and_decode_leaves_behind() -> None:
    page = (check_deploy.DEPLOY / "README.md").read_text()
    (named,) = re.findall(r"`kubectl -n pointsman delete (.*?)`", page)

    def applied(overlay: str) -> set[str]:
        objects = check_deploy.render(OVERLAYS / overlay)
        return {f"{o['kind'].lower()}/{o['metadata']['name']}" for o in objects if o["kind"] not in MADE_ANEW}

    assert set(named.split()) == applied("gpu") - applied("prefill-decode")


@pytest.mark.parametrize(
    ("overlay", "components"),
    [("gpu", ()), ("gpu", ("kv-transfer",)), ("gpu-per-node", ()), ("prefill-decode", ())],
)
def test_the_doctor_in_a_routers_pod_reaches_of_engines_what_gateways_reach(
    overlay: str, components: tuple[str, ...]
) -> None:
    def admitted(policy: dict[str, Any], name: str) -> list[object]:
        peer = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": name}}}
        return [port for rule in policy["spec"]["ingress"] if peer in rule["from"] for port in rule["ports"]]

    objects = check_deploy.render(OVERLAYS / overlay, *components)
    engines = {"app.kubernetes.io/name": "vllm"}
    policies = [
        o
        for o in objects
        if o["kind"] == "NetworkPolicy" and engines.items() <= o["spec"]["podSelector"].get("matchLabels", {}).items()
    ]
    reached = [port for policy in policies for port in admitted(policy, "gateway")]
    assert {"port": "http"} in reached
    assert ({"port": "bootstrap"} in reached) is (components != () or overlay == "prefill-decode")
    assert [port for policy in policies for port in admitted(policy, "router")] == reached


def test_the_ingress_leads_to_every_api_and_to_nothing_else() -> None:
    objects = check_deploy.render(OVERLAYS / "ha", "ingress")
    ingress = find(objects, "Ingress", "gateway")
    [rule] = ingress["spec"]["rules"]
    paths = [entry["path"] for entry in rule["http"]["paths"]]

    def reached(path: str) -> bool:
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in paths)

    assert all(reached(path) for path in ROUTES)
    assert not any(map(reached, ("/metrics", "/health", "/ready", "/live")))
    assert not [
        manifest
        for manifest in objects
        if manifest["kind"] == "ConfigMap" and manifest["metadata"]["name"] == "ingress"
    ]
    broken = copy.deepcopy(objects)
    find(broken, "Ingress", "gateway")["spec"]["rules"][0]["host"] = "other.example.com"
    find(broken, "Ingress", "gateway")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"] = "router"
    assert k8s.check(broken) == [
        "Ingress/gateway: other.example.com is served without TLS",
        "Ingress/gateway: /v1: no Service router with a port http",
    ]


def test_the_route_leads_every_api_to_the_pool_and_its_pickers() -> None:
    objects = check_deploy.render(OVERLAYS / "gateway-api")
    [rule] = find(objects, "HTTPRoute", "llm")["spec"]["rules"]
    paths = [match["path"]["value"] for match in rule["matches"]]
    assert all(any(path == prefix or path.startswith(f"{prefix}/") for prefix in paths) for path in ROUTES)
    assert not [
        manifest
        for manifest in objects
        if manifest["kind"] == "ConfigMap" and manifest["metadata"]["name"] == "gateway-api"
    ]
    changed = check_deploy.render(
        OVERLAYS / "gateway-api", files={"k8s/overlays/gateway-api/gateway-api.env": "GATEWAY=a\nGATEWAY_NAMESPACE=b\n"}
    )
    [parent] = find(changed, "HTTPRoute", "llm")["spec"]["parentRefs"]
    assert (parent["name"], parent["namespace"]) == ("a", "b")
    broken = copy.deepcopy(objects)
    pool = find(broken, "InferencePool", "vllm")["spec"]
    pool["targetPorts"] = [{"number": 8001}]
    pool["endpointPickerRef"]["port"]["number"] = 9003
    find(broken, "HTTPRoute", "llm")["spec"]["rules"][0]["backendRefs"][0]["name"] = "other"
    assert k8s.check(broken) == [
        "InferencePool/vllm: port 8001 is not a port of what it selects",
        "InferencePool/vllm: no Service picker with a port 9003",
        "HTTPRoute/llm: no InferencePool other",
    ]
    pool["endpointPickerRef"]["failureMode"] = "FailSafe"
    pool["rank"] = 1
    problems = check_deploy.schema_problems(find(broken, "InferencePool", "vllm"))
    assert len(problems) == 2, problems


def test_kv_goes_over_rdma_by_devices_that_the_pod_asks_for() -> None:
    objects = check_deploy.render(OVERLAYS / "gpu", "kv-transfer", "rdma")
    assert find(objects, "ConfigMap", "engine")["data"]["KV_PROTOCOL"] == "rdma"
    engine = next(c for c in pod(objects, "StatefulSet", "vllm")["containers"] if c["name"] == "vllm")
    for kind in ("requests", "limits"):
        assert engine["resources"][kind]["rdma/rdma_shared_device_a"] == "1"
        assert engine["resources"][kind]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("overlay", ["gpu", "gpu-per-node", "prefill-decode"])
def test_engines_let_answers_end_for_as_long_as_gateways_wait_for_them(overlay: str) -> None:
    objects = check_deploy.render(OVERLAYS / overlay)
    found = {c.spec["name"]: c for w in objects if w["kind"] in k8s.WORKLOADS for c in k8s.containers(w)}
    assert k8s.drain_s(found["vllm"], objects) >= k8s.drain_s(found["gateway"], objects) >= 3600
    # What was placed before the agent's goodbye is sent meanwhile.
    assert k8s.pause_s(found["vllm"]) >= 10


def rename_target_port(objects: Objects) -> None:
    find(objects, "Service", "gateway")["spec"]["ports"][0]["targetPort"] = "https"


def select_nobody(objects: Objects) -> None:
    find(objects, "Service", "redis")["spec"]["selector"] = {"app.kubernetes.io/name": "valkey"}


def drop_secret(objects: Objects) -> None:
    objects.remove(find(objects, "Secret", "tokens"))


def ask_for_unknown_key(objects: Objects) -> None:
    pod(objects, "Deployment", "gateway")["volumes"][0]["secret"]["items"][0]["key"] = "admin"


def leave_out_a_token(objects: Objects) -> None:
    pod(objects, "StatefulSet", "router")["volumes"][0]["secret"]["items"].pop()


def drop_config(objects: Objects) -> None:
    objects.remove(find(objects, "ConfigMap", "engine"))


def misspell_setting(objects: Objects) -> None:
    data = find(objects, "ConfigMap", "gateway")["data"]
    data["POINTSMAN_GATEWAY_DRAIN_SECONDS"] = data.pop("POINTSMAN_GATEWAY_DRAIN_TIMEOUT_S")


def set_bad_value(objects: Objects) -> None:
    find(objects, "ConfigMap", "router")["data"]["POINTSMAN_ROUTER_LOG_LEVEL"] = "loud"


def dial_wrong_port(objects: Objects) -> None:
    find(objects, "ConfigMap", "agent")["data"]["POINTSMAN_AGENT_ROUTERS"] = "router-0:50052 router-1:50051"


def listen_elsewhere(objects: Objects) -> None:
    find(objects, "ConfigMap", "gateway")["data"]["POINTSMAN_GATEWAY_LISTEN"] = "0.0.0.0:8081"


def probe_wrong_port(objects: Objects) -> None:
    pod(objects, "StatefulSet", "router")["containers"][0]["readinessProbe"]["httpGet"]["port"] = 50050


def use_undefined_variable(objects: Objects) -> None:
    pod(objects, "StatefulSet", "vllm")["containers"][0]["args"].append("--quantization=$(QUANTIZATION)")


def run_as_root(objects: Objects) -> None:
    pod(objects, "StatefulSet", "vllm")["securityContext"]["runAsNonRoot"] = False


def keep_capabilities(objects: Objects) -> None:
    del pod(objects, "StatefulSet", "redis")["containers"][0]["securityContext"]["capabilities"]


def write_to_root(objects: Objects) -> None:
    pod(objects, "Deployment", "gateway")["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = False


def link_services(objects: Objects) -> None:
    del pod(objects, "StatefulSet", "vllm")["enableServiceLinks"]


def use_latest(objects: Objects) -> None:
    pod(objects, "StatefulSet", "redis")["containers"][0]["image"] = "redis:latest"


def run_in_another_image(objects: Objects) -> None:
    pod(objects, "Deployment", "gateway")["containers"][0]["image"] = f"pointsman-agent:{VERSION}"


def ask_for_nothing(objects: Objects) -> None:
    del pod(objects, "StatefulSet", "router")["containers"][0]["resources"]["requests"]["memory"]


def mount_unknown_volume(objects: Objects) -> None:
    pod(objects, "StatefulSet", "redis")["containers"][0]["volumeMounts"][0]["name"] = "disk"


def open_unknown_port(objects: Objects) -> None:
    find(objects, "NetworkPolicy", "vllm")["spec"]["ingress"][0]["ports"][0]["port"] = "grpc"


def refuse_nobody(objects: Objects) -> None:
    objects.remove(find(objects, "NetworkPolicy", "nobody"))


def admit_no_router(objects: Objects) -> None:
    objects.remove(find(objects, "NetworkPolicy", "redis"))


def name_one_router(objects: Objects) -> None:
    find(objects, "ConfigMap", "agent")["data"]["POINTSMAN_AGENT_ROUTERS"] = "router-0:50051"


def budget_for_nobody(objects: Objects) -> None:
    find(objects, "PodDisruptionBudget", "router")["spec"]["selector"]["matchLabels"] = {"app": "router"}


def budget_for_no_gateway(objects: Objects) -> None:
    objects.remove(find(objects, "PodDisruptionBudget", "gateway"))


def budget_twice(objects: Objects) -> None:
    second = copy.deepcopy(find(objects, "PodDisruptionBudget", "vllm"))
    second["metadata"]["name"] = "engines"
    objects.append(second)


def scale_nothing(objects: Objects) -> None:
    find(objects, "HorizontalPodAutoscaler", "gateway")["spec"]["scaleTargetRef"]["name"] = "gateways"


def fix_the_count(objects: Objects) -> None:
    find(objects, "Deployment", "gateway")["spec"]["replicas"] = 2


def scrape_nobody(objects: Objects) -> None:
    del find(objects, "Service", "vllm")["metadata"]["labels"]["pointsman/scraped"]


def scrape_no_port(objects: Objects) -> None:
    find(objects, "ServiceMonitor", "router")["spec"]["endpoints"][0]["port"] = "http"


def take_a_node_port(objects: Objects) -> None:
    pod(objects, "StatefulSet", "vllm")["containers"][0]["ports"][0]["hostPort"] = 8000


def select_no_replica(objects: Objects) -> None:
    find(objects, "Service", "router-1")["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] = "router-2"


def lose_governing_service(objects: Objects) -> None:
    find(objects, "Service", "vllm")["spec"]["clusterIP"] = "10.0.0.1"


def kill_too_soon(objects: Objects) -> None:
    pod(objects, "StatefulSet", "vllm")["terminationGracePeriodSeconds"] = 3600


def define_twice(objects: Objects) -> None:
    objects.append(copy.deepcopy(find(objects, "Service", "redis")))


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (rename_target_port, "Service/gateway: targetPort https is not a port of Deployment/gateway"),
        (select_nobody, "Service/redis: its selector matches 0 workloads"),
        (drop_secret, "no Secret tokens"),
        (ask_for_unknown_key, "has no key admin"),
        (leave_out_a_token, "StatefulSet/router/router: no token file observer is mounted"),
        (drop_config, "StatefulSet/vllm/vllm: no ConfigMap engine-"),
        (misspell_setting, "`pointsman gateway` does not read POINTSMAN_GATEWAY_DRAIN_SECONDS"),
        (set_bad_value, "StatefulSet/router/router: POINTSMAN_ROUTER_LOG_LEVEL: "),
        (dial_wrong_port, "POINTSMAN_AGENT_ROUTERS: nothing here serves router-0:50052"),
        (listen_elsewhere, "POINTSMAN_GATEWAY_LISTEN listens on 8081, which is not one of its ports"),
        (probe_wrong_port, "StatefulSet/router/router: readinessProbe: port 50050 is not one of its ports"),
        (use_undefined_variable, "StatefulSet/vllm/vllm: $(QUANTIZATION) is not in its environment"),
        (run_as_root, "StatefulSet/vllm: runAsNonRoot must be true"),
        (keep_capabilities, "StatefulSet/redis/redis: all capabilities must be dropped"),
        (write_to_root, "Deployment/gateway/gateway: readOnlyRootFilesystem must be true"),
        (link_services, "StatefulSet/vllm: enableServiceLinks must be false"),
        (use_latest, "StatefulSet/redis/redis: image redis needs a tag other than latest"),
        (run_in_another_image, f"the image pointsman-agent:{VERSION} has not what `pointsman gateway` needs"),
        (ask_for_nothing, "StatefulSet/router/router: resources.requests.memory is not said"),
        (mount_unknown_volume, "StatefulSet/redis/redis: no volume disk"),
        (open_unknown_port, "NetworkPolicy/vllm: port grpc is not a port of what it selects"),
        (refuse_nobody, "no NetworkPolicy refuses what no other one admits"),
        (admit_no_router, "StatefulSet/redis: no NetworkPolicy admits anybody to its pods"),
        (lose_governing_service, "StatefulSet/vllm: serviceName vllm is no headless Service"),
        (name_one_router, "ConfigMap agent: POINTSMAN_AGENT_ROUTERS does not name router-1"),
        (budget_for_nobody, "PodDisruptionBudget/router: selects no workload"),
        (budget_for_no_gateway, "Deployment/gateway: no PodDisruptionBudget selects its pods"),
        (budget_twice, "StatefulSet/vllm: selected by PodDisruptionBudget/vllm and PodDisruptionBudget/engines"),
        (scale_nothing, "HorizontalPodAutoscaler/gateway: no Deployment gateways"),
        (fix_the_count, "Deployment/gateway has replicas of its own"),
        (scrape_nobody, "ServiceMonitor/agent: selects no Service"),
        (scrape_no_port, "ServiceMonitor/router: Service/router has no port http"),
        (take_a_node_port, "StatefulSet/vllm/vllm: the namespace's standard refuses the node's port 8000"),
        (select_no_replica, "Service/router-1: its selector matches 0 workloads"),
        (kill_too_soon, "StatefulSet/vllm/vllm: ends in up to 3612 s, and its pod is killed after 3600 s"),
        (define_twice, "Service/redis: defined 2 times"),
    ],
)
def test_mistake_is_refused(rendered: Objects, mistake: Callable[[Objects], None], expected: str) -> None:
    broken = copy.deepcopy(rendered)
    mistake(broken)
    problems = k8s.check(broken)
    assert any(expected in line for line in problems), problems
    assert all("\n" not in line for line in problems)


def test_schema_refuses_an_unknown_field(rendered: Objects) -> None:
    broken = copy.deepcopy(find(rendered, "StatefulSet", "router"))
    broken["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    assert len(check_deploy.schema_problems(broken)) == 1


def test_schema_of_the_operators_kinds_refuses_an_unknown_field(rendered: Objects) -> None:
    broken = copy.deepcopy(find(rendered, "ServiceMonitor", "router"))
    broken["spec"]["endpoints"][0]["honourLabels"] = True
    [problem] = check_deploy.schema_problems(broken)
    assert "honourLabels" in problem


@pytest.mark.parametrize(
    ("overlay", "agent"),
    [("ha", "StatefulSet/vllm"), ("gpu-per-node", "DaemonSet/agent"), ("external-engines", "Deployment/agent")],
)
def test_with_tls_everyone_has_a_certificate_of_its_own(overlay: str, agent: str) -> None:
    objects = check_deploy.render(OVERLAYS / overlay, "tls")
    for where, name in (("StatefulSet/router", "router"), ("Deployment/gateway", "gateway"), (agent, "agent")):
        spec = pod(objects, *where.split("/"))
        container = next(c for c in spec["containers"] if c["name"] == name)
        values = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert [values[f"POINTSMAN_TLS_{kind}"] for kind in ("CERT", "KEY", "CA")] == [
            f"/run/tls/{file}.pem" for file in ("cert", "key", "ca")
        ]
        [volume] = [volume for volume in spec["volumes"] if volume["name"] == "tls"]
        assert volume["secret"]["secretName"] == f"tls-{name}"
        assert not any(
            "grpc" in container.get(probe, {}) for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        )
