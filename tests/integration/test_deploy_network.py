"""NetworkPolicies are enforced between network namespaces: each part reaches what it needs, and nothing else is reached.

The fleets are the pods of the overlays as processes, with emulated engines, at their own addresses and ports.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.http_request import Reply, ask
from tests.support.processes.kubernetes_pods import Cluster, Pod
from tests.support.processes.pod_network import NODE, PodNetwork, unavailable
from tests.support.waiting import until
from tools import check_deploy
from tools.deploy_checks import k8s

pytestmark = pytest.mark.skipif(bool(why := unavailable()), reason=f"no network namespaces: {why}")

OVERLAYS = check_deploy.DEPLOY / "k8s/overlays"
# Pods that are not the deployment's, with their namespaces; and the labels that the pages say these namespaces need.
STRANGERS = {
    "stranger": "pointsman",
    "client": "default",
    "prometheus": "monitoring",
    "proxy": "ingress",
    "engine-elsewhere": "models",
}
LABELS: dict[str, dict[str, str]] = {
    "default": {},
    "monitoring": {"pointsman/metrics": "allowed"},
    "ingress": {"pointsman/proxy": "allowed"},
    "models": {"pointsman/engines": "allowed"},
}
WITHIN_S = 90.0

# Workload and port -> the workloads and strangers that reach it.
Allowed = dict[tuple[str, int | str], set[str]]
EVERYBODY = {"router", "gateway", "vllm", "vllm-prefill", "vllm-decode", "agent", "redis", *STRANGERS}
PLANE: Allowed = {
    ("router", "metrics"): {"prometheus"},
    ("gateway", "http"): EVERYBODY,
    ("redis", "redis"): {"router"},
}
ENGINES: Allowed = {
    ("router", "grpc"): {"router", "gateway", "vllm"},
    ("vllm", "http"): {"gateway", "router", "prometheus"},
    ("vllm", "agent-metrics"): {"prometheus"},
}
KV_TRANSFER: Allowed = {
    ("vllm", "bootstrap"): {"vllm", "gateway", "router"},
    ("vllm", 16_000): {"vllm"},
    ("vllm", 40_000): {"vllm"},
}
# One port for each rank.
KV_EVENTS: Allowed = {("vllm", first + rank): {"agent"} for first in (5557, 5657) for rank in range(8)}


def of_roles(allowed: Allowed) -> Allowed:
    """The same for engines of two roles in place of those of one."""
    roles = {"vllm-prefill", "vllm-decode"}
    both = {key: (sources - {"vllm"}) | (roles if "vllm" in sources else set()) for key, sources in allowed.items()}
    return {
        (role, port): sources
        for (name, port), sources in both.items()
        for role in (roles if name == "vllm" else {name})
    }


CASES: list[tuple[str, tuple[str, ...], Allowed]] = [
    ("single-node", (), {key: PLANE[key] for key in PLANE if key[0] != "redis"} | ENGINES),
    ("gpu", ("kv-transfer", "two-routers"), PLANE | ENGINES | KV_TRANSFER),
    ("prefill-decode", (), of_roles(PLANE | ENGINES | KV_TRANSFER)),
    (
        "gpu-per-node",
        (),
        PLANE
        | {
            ("router", "grpc"): {"router", "gateway", "agent"},
            ("vllm", "http"): {"gateway", "router", "prometheus", "agent"},
            ("agent", "agent-metrics"): {"prometheus"},
            ("agent", "loads"): {"vllm"},
        }
        | KV_EVENTS,
    ),
    (
        "external-engines",
        (),
        PLANE
        | {
            ("router", "grpc"): {"router", "gateway", "agent"},
            ("agent", "agent-metrics"): {"prometheus"},
            ("agent", "loads"): {"engine-elsewhere"},
        },
    ),
    (
        "gateway-api",
        (),
        PLANE
        | ENGINES
        | {("gateway", "ext-proc"): {"proxy"}, ("vllm", "http"): {"gateway", "router", "prometheus", "proxy"}},
    ),
]


@contextmanager
def cluster(folder: Path, overlay: str, *components: str) -> Iterator[Cluster]:
    """The overlay in a network, without pods but those of STRANGERS."""
    network = PodNetwork(folder)
    made = Cluster(
        check_deploy.render(OVERLAYS / overlay, *components), folder, "http://127.0.0.1:9", network, emulated=True
    )
    try:
        network.start()
        for name, namespace in STRANGERS.items():
            network.add(name, namespace, {"app": name}, {})
        yield made
    finally:
        made.stop()
        network.stop()


def reached(made: Cluster, more: Iterable[tuple[str, int | str]] = ()) -> Allowed:
    """Workload and port -> who reaches it on any of its pods, for all ports of all pods and those of `more`."""
    network = made.network
    assert network is not None
    roles = {name: kind(pod) for name, pod in made.pods.items()} | {name: name for name in STRANGERS}
    found: Allowed = {}
    for target, pod in made.pods.items():
        labels = {number: name or number for number, name in pod.ports.items()}
        labels |= {port: port for workload, port in more if workload == kind(pod) and isinstance(port, int)}
        for number, label in labels.items():
            sources = found.setdefault((kind(pod), label), set())
            sources |= {roles[s] for s in network.members if s != target and network.reaches(s, target, number)}
    return found


def kind(pod: Pod) -> str:
    """The name of a pod's workload."""
    return str(pod.workload["metadata"]["name"])


def by_number(made: Cluster, allowed: Allowed) -> Allowed:
    """The same with names of ports as the pods name them: a port that has a name is not told by its number."""
    numbers = {(kind(pod), number): name for pod in made.pods.values() for number, name in pod.ports.items()}
    return {
        (workload, numbers.get((workload, port), "") or port if isinstance(port, int) else port): sources
        for (workload, port), sources in allowed.items()
    }


@pytest.mark.parametrize(("overlay", "components", "allowed"), CASES, ids=[case[0] for case in CASES])
def test_each_port_is_reached_by_those_who_need_it_alone(
    tmp_path: Path, overlay: str, components: tuple[str, ...], allowed: Allowed
) -> None:
    """Listeners stand for the services."""
    with cluster(tmp_path, overlay, *components) as made, contextlib.ExitStack() as listeners:
        network = made.network
        assert network is not None
        for started in (o for o in made.objects if o["kind"] in k8s.WORKLOADS):
            name = started["metadata"]["name"]
            # Two, as pods of one kind may reach each other.
            for number in range(1 if name in ("redis", "gateway") else 2):
                made.add(name, f"{name}-{number}")
        more = {(workload, port) for workload, port in allowed if isinstance(port, int) and port > 10_000}
        for name, pod in made.pods.items():
            ports = {*pod.ports, *(port for workload, port in more if workload == kind(pod))}
            for port in ports:
                listeners.enter_context(network.inside(name, partial(socket.create_server, ("", port))))
        # A pod that somebody else starts in the namespace has no policy of its own.
        listeners.enter_context(network.inside("stranger", partial(socket.create_server, ("", 8080))))
        some = {("stranger", "router-0", 50051), ("client", "gateway-0", 8080), ("client", "stranger", 8080)}
        assert {each for each in some if network.reaches(*each)} == some, "without policies all is reached"
        made.enforce_policies(LABELS)
        assert not network.reaches("client", "stranger", 8080)
        present = {kind(pod) for pod in made.pods.values()} | {*STRANGERS}
        expected = {key: sources & present for key, sources in by_number(made, allowed).items()}
        # A pod's own other pods count as others; of one pod there is none.
        for (workload, _), sources in expected.items():
            if sum(kind(pod) == workload for pod in made.pods.values()) == 1:
                sources.discard(workload)
        assert reached(made, more) == expected


def metric(page: str, name: str) -> float:
    """The sum of a metric's samples in a page of metrics."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE))


class Fleet:
    """A cluster whose pods run."""

    def __init__(self, made: Cluster) -> None:
        assert made.network is not None
        self.cluster, self.network = made, made.network

    def start(self, pods: dict[str, str]) -> None:
        """Start pods (name -> workload) all at once, under the overlay's policies, and wait until all are ready."""
        for name, workload in pods.items():
            self.cluster.add(workload, name)
        self.cluster.name_pods()
        self.cluster.enforce_policies(LABELS)
        for name in pods:
            self.cluster.pods[name].start()
        for name in pods:
            self.cluster.pods[name].wait_ready(WITHIN_S)

    def chat(self, gateway: str, text: str) -> Reply:
        """What a client elsewhere in the cluster gets for a question."""
        key = self.cluster.secret("api-keys", "api-keys").strip().partition(":")[2]
        body = {"model": "qwen3-coder", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        url = self.cluster.pods[gateway].url("http") + "/v1/chat/completions"
        return self.network.inside("client", lambda: ask(url, body, headers={"Authorization": f"Bearer {key}"}))

    def metrics(self, pod: str, port: str) -> str:
        """The metrics of a pod, as Prometheus gets them."""
        return self.network.inside("prometheus", lambda: ask(self.cluster.pods[pod].url(port) + "/metrics").text)

    def instances(self, router: str, *without: str) -> tuple[int, str]:
        """Exit status and output of `kubectl exec ROUTER -- pointsman instances`; `without`: variables that are removed."""
        pod = self.cluster.pods[router]
        words = ["env", *(f"--unset={name}" for name in without), "pointsman", "instances", "--json"]
        done = pod.execute(pod.spec["containers"][0], words)
        return done.returncode, done.stdout + done.stderr


LONG = "Which way does the train go? " * 40


def test_two_routers_and_two_gateways_start_from_nothing_with_tls(tmp_path: Path) -> None:
    """The pods of `ha` with `tls`, started all at once, work under its policies, and go on without one router."""
    with cluster(tmp_path, "ha", "tls") as made:
        fleet = Fleet(made)
        pods = {"redis-0": "redis"} | {f"{name}-{n}": name for name in ("router", "gateway", "vllm") for n in range(2)}
        fleet.start(pods)
        routers, gateways = ("router-0", "router-1"), ("gateway-0", "gateway-1")

        def ready(router: str) -> bool:
            return metric(fleet.metrics(router, "metrics"), 'pointsman_router_instances{[^}]*state="READY"[^}]*}') == 2

        for router in routers:
            until(partial(ready, router), within_s=WITHIN_S, what=f"both instances ready at {router}")
        for gateway in gateways:
            for _ in range(2):
                assert fleet.chat(gateway, LONG).status == 200
            assert metric(fleet.metrics(gateway, "http"), "pointsman_gateway_degraded_placements_total") == 0
        assert sum(
            metric(fleet.metrics(f"vllm-{n}", "agent-metrics"), "pointsman_agent_event_batches_total") for n in (0, 1)
        )
        cached = "pointsman_router_reported_cached_tokens_total"
        until(
            lambda: sum(metric(fleet.metrics(name, "metrics"), cached) for name in routers),
            within_s=10,
            what="cached tokens",
        )
        owned = {name: metric(fleet.metrics(name, "metrics"), "pointsman_router_pool_owned") for name in routers}
        assert sorted(owned.values()) == [0, 1]
        assert all(metric(fleet.metrics(name, "metrics"), "pointsman_router_store_degraded") == 0 for name in routers)

        allowed = {key: sources & {*STRANGERS, *pods.values()} for key, sources in (PLANE | ENGINES).items()}
        allowed["redis", "redis"].discard("redis")
        assert reached(made) == allowed

        owner = max(owned, key=lambda name: owned[name])
        [other] = {*routers} - {owner}
        status, said = fleet.instances(other)
        assert (status, said.count('"instance_id"'), "not counted" in said) == (0, 2, False), said
        status, said = fleet.instances(other, "POINTSMAN_TLS_CERT", "POINTSMAN_TLS_KEY")
        assert status == 1, "a client without a certificate is refused"

        made.pods[owner].kill()
        for gateway in gateways:
            assert fleet.chat(gateway, LONG).status == 200
        until(
            lambda: metric(fleet.metrics(other, "metrics"), "pointsman_router_pool_owned") == 1,
            within_s=WITHIN_S,
            what="the other router owns the pool",
        )


def test_agents_on_nodes_get_kv_events_and_gateways_call_the_nodes_port(tmp_path: Path) -> None:
    """The pods of `gpu-per-node`, whose KV events pass the network."""
    with cluster(tmp_path, "gpu-per-node") as made:
        fleet = Fleet(made)
        fleet.start({f"{name}-0": name for name in ("redis", "router", "vllm", "agent", "gateway")})
        for _ in range(2):
            answer = fleet.chat("gateway-0", LONG)
            assert answer.status == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        page = fleet.metrics("router-0", "metrics")
        assert metric(page, "pointsman_router_keys") > 0
        assert f'instance="{NODE}:8000"' in page
        assert metric(fleet.metrics("agent-0", "agent-metrics"), "pointsman_agent_event_batches_total") > 0
