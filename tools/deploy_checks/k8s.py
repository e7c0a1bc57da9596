"""Cross-checks between the objects of a rendered kustomization: names, ports, selectors, references, and the rules of this
project for containers. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tools.deploy_checks import service_environment as services

Object = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")
# Kinds of objects that are in no namespace.
CLUSTER_WIDE = ("Namespace", "ClusterRole", "ClusterRoleBinding")
# Containers that may write to their own file system, and why.
WRITABLE = {"vllm": "it writes compiled kernels to the home folder"}
# The metric that engines are scaled on, a pattern of the labels in its query, and the pattern of a label value in Kubernetes.
BACKLOG = "pointsman_router_backlog_seconds"
QUERY_LABEL = re.compile(r'(\w+)="([^"]*)"')
LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Container:
    """A container with its pod template and the names of its workload's volume claim templates."""

    where: str
    spec: Object
    pod: Object
    claims: frozenset[str]


def check(objects: list[Object]) -> list[str]:
    """Return all problems of a rendered kustomization."""
    problems = [*_names(objects), *_routers_named(objects)]
    for workload in _workloads(objects):
        problems += _workload(workload, objects)
        for container in containers(workload):
            problems += _container(container, objects)
    for service in _of(objects, "Service"):
        problems += _service(service, objects)
    for ingress in _of(objects, "Ingress"):
        problems += _ingress(ingress, objects)
    for policy in _of(objects, "NetworkPolicy"):
        problems += _network_policy(policy, objects)
    problems += _closed(objects)
    problems += [*_budgets(objects), *_cluster_wide(objects)]
    for scaler in (*_of(objects, "HorizontalPodAutoscaler"), *_of(objects, "ScaledObject")):
        problems += _autoscaler(scaler, objects)
    for monitor in _of(objects, "ServiceMonitor"):
        problems += _monitor(monitor, objects)
    for pool in _of(objects, "InferencePool"):
        problems += _inference_pool(pool, objects)
    for route in _of(objects, "HTTPRoute"):
        problems += _route(route, objects)
    return problems


def containers(workload: Object) -> Iterator[Container]:
    """Yield the containers of a workload, including init containers."""
    pod = workload["spec"]["template"]["spec"]
    claims = frozenset(_name(claim) for claim in workload["spec"].get("volumeClaimTemplates", []))
    for spec in [*pod.get("initContainers", []), *pod["containers"]]:
        yield Container(f"{_id(workload)}/{spec['name']}", spec, pod, claims)


def _names(objects: list[Object]) -> Iterator[str]:
    for (kind, name), count in Counter((o["kind"], _name(o)) for o in objects).items():
        if count > 1:
            yield f"{kind}/{name}: defined {count} times"
    namespaces = {_name(o) for o in _of(objects, "Namespace")}
    for o in objects:
        if o["kind"] not in CLUSTER_WIDE and o["metadata"].get("namespace") not in namespaces:
            yield f"{_id(o)}: namespace {o['metadata'].get('namespace')} is not defined here"


def _routers_named(objects: list[Object]) -> Iterator[str]:
    """Yield a problem for each router that a list of routers does not name: agents report to all routers, gateways may use
    any."""
    replicas = {
        f"{_name(w)}-{n}" for w in _workloads(objects) if _name(w) == "router" for n in range(w["spec"]["replicas"])
    }
    for config_map in _of(objects, "ConfigMap"):
        for variable, value in config_map.get("data", {}).items():
            if variable.startswith("POINTSMAN_") and variable.endswith("_ROUTERS"):
                for missing in sorted(replicas - {address.partition(":")[0] for address in value.split()}):
                    yield f"ConfigMap {_name(config_map).rpartition('-')[0]}: {variable} does not name {missing}"


def _workload(workload: Object, objects: list[Object]) -> Iterator[str]:
    where, spec = _id(workload), workload["spec"]
    pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
    if not _selects(spec["selector"]["matchLabels"], labels):
        yield f"{where}: its selector does not match its own pods"
    if workload["kind"] == "StatefulSet":
        governing = [s for s in _of(objects, "Service") if _name(s) == spec["serviceName"]]
        if not governing or governing[0]["spec"].get("clusterIP") != "None":
            yield f"{where}: serviceName {spec['serviceName']} is no headless Service"
    for key in ("automountServiceAccountToken", "enableServiceLinks"):
        if pod.get(key) is not False:
            yield f"{where}: {key} must be false"
    if pod.get("securityContext", {}).get("runAsNonRoot") is not True:
        yield f"{where}: runAsNonRoot must be true"
    if pod.get("securityContext", {}).get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield f"{where}: seccompProfile must be RuntimeDefault"
    if "terminationGracePeriodSeconds" not in pod:
        yield f"{where}: terminationGracePeriodSeconds is not said"
    else:
        yield from _cut_off(workload, objects)
    mounted = {mount["name"] for c in containers(workload) for mount in c.spec.get("volumeMounts", [])}
    for volume in pod.get("volumes", []):
        if volume["name"] not in mounted:
            yield f"{where}: volume {volume['name']} is mounted nowhere"
        for kind, key in (("Secret", "secret"), ("ConfigMap", "configMap")):
            if key in volume:
                source = volume[key]
                name = source.get("secretName", source.get("name"))
                data = _data(objects, kind, name)
                if data is None:
                    yield f"{where}: volume {volume['name']}: no {kind} {name}"
                for item in source.get("items", []):
                    if data is not None and item["key"] not in data:
                        yield f"{where}: volume {volume['name']}: {kind} {name} has no key {item['key']}"
    yield from _unprobed(workload)


def _cut_off(workload: Object, objects: list[Object]) -> Iterator[str]:
    """Yield a problem for each container whose pause before SIGTERM and drain time after it are not shorter than the pod's grace
    period."""
    grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for container in containers(workload):
        needed = pause_s(container) + drain_s(container, objects)
        if needed >= grace:
            yield f"{container.where}: ends in up to {needed} s, and its pod is killed after {grace} s"


def pause_s(container: Container) -> int:
    """Return how long the container's pre-stop hook sleeps, in s."""
    hook = container.spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    return int(hook[1]) if hook[:1] == ["sleep"] else 0


def drain_s(container: Container, objects: list[Object]) -> int:
    """Return how long the container (a gateway or an engine) drains requests after SIGTERM, in s."""
    env, _, _ = environment(container, objects)
    timeouts_s = [env.get("POINTSMAN_GATEWAY_DRAIN_TIMEOUT_S", "0")]
    timeouts_s += [
        word.partition("=")[2] for word in container.spec.get("args", []) if word.startswith("--shutdown-timeout=")
    ]
    return max(map(int, timeouts_s))


def _unprobed(workload: Object) -> Iterator[str]:
    for container in containers(workload):
        for probe in ("readinessProbe", "livenessProbe"):
            if probe not in container.spec:
                yield f"{container.where}: no {probe}"


def _container(container: Container, objects: list[Object]) -> list[str]:
    problems = [*_locked(container), *_ports(container), *_mounts(container), *_node_ports(container, objects)]
    env, secret, env_problems = environment(container, objects)
    problems += env_problems
    words = [*container.spec.get("command", []), *container.spec.get("args", [])]
    defined = {*env, *secret}
    problems += _split(container, env, _data_parallel_size(container, objects))
    for variable in sorted({v for word in words for v in re.findall(r"\$\((\w+)\)", word)} - defined):
        problems.append(f"{container.where}: $({variable}) is not in its environment")
    if services.subcommand_of(container.spec["image"]):
        problems += _check_environment(container, env, secret, objects)
    return problems


def _split(container: Container, env: Mapping[str, str], ranks: int) -> Iterator[str]:
    """Yield a problem if an engine's TENSOR_PARALLEL_SIZE is not its number of GPUs for each of its data-parallel ranks: it
    would not start, or not use all of them."""
    split = env.get("TENSOR_PARALLEL_SIZE")
    for kind in ("requests", "limits"):
        gpus = container.spec.get("resources", {}).get(kind, {}).get("nvidia.com/gpu")
        if split is not None and gpus is not None and str(gpus) != str(int(split) * ranks):
            times = f" for each of {ranks} data-parallel ranks" if ranks > 1 else ""
            yield f"{container.where}: {kind} {gpus} GPUs, and TENSOR_PARALLEL_SIZE is {split}{times}"


def _data_parallel_size(container: Container, objects: list[Object]) -> int:
    """Return the number of data-parallel ranks that an engine's arguments or its mounted file of flags set; 1 if neither does."""
    given = re.findall(r"--data-parallel-size[= ](\d+)", " ".join(container.spec.get("args", [])))
    maps = [volume["configMap"]["name"] for volume in container.pod.get("volumes", []) if "configMap" in volume]
    for name in maps if not given else ():
        flags = yaml.safe_load((_data(objects, "ConfigMap", name) or {}).get("engine.yaml", "")) or {}
        given += [str(flags["data-parallel-size"])] if "data-parallel-size" in flags else []
    return int(given[0]) if given else 1


def _node_ports(container: Container, objects: list[Object]) -> Iterator[str]:
    standard = [n["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") for n in _of(objects, "Namespace")]
    for port in container.spec.get("ports", []):
        if "hostPort" in port and standard != ["privileged"]:
            yield f"{container.where}: the namespace's standard refuses the node's port {port['hostPort']}"


def _locked(container: Container) -> Iterator[str]:
    spec = container.spec
    image, _, tag = spec["image"].rpartition("/")[2].partition(":")
    if not tag or tag == "latest":
        yield f"{container.where}: image {image} needs a tag other than latest"
    context = spec.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{container.where}: allowPrivilegeEscalation must be false"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{container.where}: all capabilities must be dropped"
    if context.get("readOnlyRootFilesystem") is not True and spec["name"] not in WRITABLE:
        yield f"{container.where}: readOnlyRootFilesystem must be true"
    resources = spec.get("resources", {})
    for kind, what in (("requests", "cpu"), ("requests", "memory"), ("limits", "memory")):
        if what not in resources.get(kind, {}):
            yield f"{container.where}: resources.{kind}.{what} is not said"


def _ports(container: Container) -> Iterator[str]:
    ports = {p.get("name"): p["containerPort"] for p in container.spec.get("ports", [])}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        for action in ("grpc", "httpGet", "tcpSocket"):
            port = container.spec.get(probe, {}).get(action, {}).get("port")
            if port is not None and port not in ports and port not in ports.values():
                yield f"{container.where}: {probe}: port {port} is not one of its ports"


def _mounts(container: Container) -> Iterator[str]:
    volumes = {v["name"] for v in container.pod.get("volumes", [])} | container.claims
    for mount in container.spec.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"{container.where}: no volume {mount['name']}"


def environment(container: Container, objects: list[Object]) -> tuple[dict[str, str], set[str], list[str]]:
    """Return (variables with expanded values, variables whose value is from a secret or the pod, problems)."""
    env: dict[str, str] = {}
    unknown: set[str] = set()
    problems = []
    for source in container.spec.get("envFrom", []):
        for kind, key in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if key in source:
                data = _data(objects, kind, source[key]["name"])
                if data is None:
                    problems.append(f"{container.where}: no {kind} {source[key]['name']}")
                elif kind == "Secret":
                    unknown |= set(data)
                else:
                    env.update(data)
    for entry in container.spec.get("env", []):
        name = entry["name"]
        if "value" in entry:
            problems += [
                f"{container.where}: {name}: $({variable}) is not defined before it"
                for variable in re.findall(r"\$\((\w+)\)", entry["value"])
                if variable not in env and variable not in unknown
            ]
            env[name] = re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[1].lower().replace("_", "-")), entry["value"])
            continue
        unknown.add(name)
        for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
            if not (reference := entry["valueFrom"].get(key)):
                continue
            data = _data(objects, kind, reference["name"]) or {}
            if reference["key"] in data:
                if kind == "ConfigMap":
                    unknown.remove(name)
                    env[name] = data[reference["key"]]
            elif not reference.get("optional"):
                problems.append(f"{container.where}: {name}: no key {reference['key']} in {kind} {reference['name']}")
    return env, unknown, problems


def _check_environment(container: Container, env: dict[str, str], secret: set[str], objects: list[Object]) -> list[str]:
    command = container.spec["args"][0]
    files = frozenset(_files(container, objects))
    checked = services.ServiceEnvironment(
        container.where, command, container.spec["image"], env, files, frozenset(secret)
    )
    problems = services.check(checked)
    ports = {p["containerPort"] for p in container.spec.get("ports", [])}
    for variable, port in services.listens(checked):
        if port not in ports:
            problems.append(f"{container.where}: {variable} listens on {port}, which is not one of its ports")
    offered = {
        (_name(s), port["port"]) for s in _of(objects, "Service") for port in s["spec"]["ports"]
    }  # fmt: skip
    node_ports = {
        p["hostPort"]
        for w in _workloads(objects)
        for c in containers(w)
        for p in c.spec.get("ports", [])
        if "hostPort" in p
    }
    on_node = {
        entry["name"].lower().replace("_", "-")
        for entry in container.spec.get("env", [])
        if entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") == "status.hostIP"
    }
    beside = {p["containerPort"] for c in container.pod["containers"] for p in c.get("ports", [])}
    namespaces = {_name(o) for o in _of(objects, "Namespace")}
    for variable, host, port in services.dialed_addresses(checked) if not problems else ():
        if host in ("127.0.0.1", "localhost"):
            reachable = port in beside
        elif _is_elsewhere(host, namespaces):
            reachable = True
        else:
            # A host is NAME, POD.NAME.NAMESPACE.svc for one pod of a headless Service, or the container's own node.
            reachable = any((part, port) in offered for part in host.split(".")[:2])
            reachable = reachable or (host in on_node and port in node_ports)
        if not reachable:
            problems.append(f"{container.where}: {variable}: nothing here serves {host}:{port}")
    return problems


def _is_elsewhere(host: str, namespaces: set[str]) -> bool:
    """Return whether nothing of what is checked can serve `host`: an IP address, or a name of another namespace than
    `namespaces` (NAME.NAMESPACE.svc, POD.NAME.NAMESPACE.svc)."""
    if re.fullmatch(r"[\d.]+|[\da-f:]*:[\da-f:.]*", host):
        return True
    parts = host.split(".")
    return len(parts) > 2 and parts[-1] == "svc" and parts[-2] not in {"pod-namespace", *namespaces}


def _files(container: Container, objects: list[Object]) -> Iterator[str]:
    volumes = {v["name"]: v for v in container.pod.get("volumes", [])}
    for mount in container.spec.get("volumeMounts", []):
        source = volumes.get(mount["name"], {}).get("secret")
        if source:
            items = [i["path"] for i in source.get("items", [])] or _data(objects, "Secret", source["secretName"]) or []
            yield from (f"{mount['mountPath']}/{path}" for path in items)


def _service(service: Object, objects: list[Object]) -> Iterator[str]:
    where, spec = _id(service), service["spec"]
    served = [w for w in _workloads(objects) if any(_selects(spec["selector"], labels) for labels in _pod_labels(w))]
    if len(served) != 1:
        yield f"{where}: its selector matches {len(served)} workloads"
        return
    ports = _port_names(served[0])
    for port in spec["ports"]:
        target = port.get("targetPort", port["port"])
        if target not in ports:
            yield f"{where}: targetPort {target} is not a port of {_id(served[0])}"


def _ingress(ingress: Object, objects: list[Object]) -> Iterator[str]:
    where, spec = _id(ingress), ingress["spec"]
    secured = {host for tls in spec.get("tls", []) for host in tls.get("hosts", [])}
    ports = {(_name(s), port.get("name")) for s in _of(objects, "Service") for port in s["spec"]["ports"]}
    for rule in spec["rules"]:
        if rule.get("host") not in secured:
            yield f"{where}: {rule.get('host')} is served without TLS"
        for path in rule["http"]["paths"]:
            service = path["backend"]["service"]
            if (service["name"], service["port"].get("name")) not in ports:
                yield f"{where}: {path['path']}: no Service {service['name']} with a port {service['port'].get('name')}"


def _inference_pool(pool: Object, objects: list[Object]) -> Iterator[str]:
    where, spec = _id(pool), pool["spec"]
    chosen = [w for w in _workloads(objects) if _matches(spec["selector"], w)]
    if not chosen:
        yield f"{where}: selects no workload"
    ports = {port for workload in chosen for port in _port_names(workload)}
    for port in spec["targetPorts"]:
        if port["number"] not in ports:
            yield f"{where}: port {port['number']} is not a port of what it selects"
    picker = spec["endpointPickerRef"]
    offered = {(_name(s), port["port"]) for s in _of(objects, "Service") for port in s["spec"]["ports"]}
    if (picker["name"], picker["port"]["number"]) not in offered:
        yield f"{where}: no Service {picker['name']} with a port {picker['port']['number']}"


def _route(route: Object, objects: list[Object]) -> Iterator[str]:
    pools = {_name(pool) for pool in _of(objects, "InferencePool")}
    for rule in route["spec"]["rules"]:
        for backend in rule["backendRefs"]:
            if backend.get("kind") != "InferencePool" or backend["name"] not in pools:
                yield f"{_id(route)}: no InferencePool {backend['name']}"


def _network_policy(policy: Object, objects: list[Object]) -> Iterator[str]:
    where, spec = _id(policy), policy["spec"]
    chosen = [w for w in _workloads(objects) if _matches(spec["podSelector"], w)]
    if not chosen:
        yield f"{where}: selects no workload"
    ports = {port for workload in chosen for port in _port_names(workload)}
    for rule in spec.get("ingress", []):
        for port in rule.get("ports", []):
            # A range may be for ports that are chosen at random, which no container can declare.
            if port["port"] not in ports and "endPort" not in port:
                yield f"{where}: port {port['port']} is not a port of what it selects"
        for peer in rule.get("from", []):
            if "podSelector" in peer and not any(_matches(peer["podSelector"], w) for w in _workloads(objects)):
                yield f"{where}: a peer selects no workload"


def _closed(objects: list[Object]) -> Iterator[str]:
    """Yield a problem if what no policy admits is not refused, or if pods admit nothing at all."""
    policies = _of(objects, "NetworkPolicy")
    if not any(not p["spec"]["podSelector"] and not p["spec"].get("ingress") for p in policies):
        yield "no NetworkPolicy refuses what no other one admits"
    for workload in _workloads(objects):
        if not any(p["spec"].get("ingress") and _matches(p["spec"]["podSelector"], workload) for p in policies):
            yield f"{_id(workload)}: no NetworkPolicy admits anybody to its pods"


def _budgets(objects: list[Object]) -> Iterator[str]:
    """Yield a problem for each budget without pods, and for each workload whose pods a drain would stop all at once, or never:
    Kubernetes evicts no pod that two budgets select."""
    budgets = _of(objects, "PodDisruptionBudget")
    for budget in budgets:
        if not any(_matches(budget["spec"]["selector"], w) for w in _workloads(objects)):
            yield f"{_id(budget)}: selects no workload"
    for workload in _workloads(objects):
        chosen_by = [_id(budget) for budget in budgets if _matches(budget["spec"]["selector"], workload)]
        if len(chosen_by) > 1:
            yield f"{_id(workload)}: selected by {' and '.join(chosen_by)}"
        # A drain leaves the pods of a DaemonSet. Of Redis and of the agent of engines elsewhere there is one at most.
        serves = any(
            c["name"] in ("router", "gateway", "vllm") for c in workload["spec"]["template"]["spec"]["containers"]
        )
        if serves and workload["kind"] != "DaemonSet" and not chosen_by:
            yield f"{_id(workload)}: no PodDisruptionBudget selects its pods"


def _cluster_wide(objects: list[Object]) -> Iterator[str]:
    """Yield a problem for each object without a namespace that a deployment in another namespace would overwrite, and for each
    binding of a role that is not here."""
    namespaces = [_name(o) for o in _of(objects, "Namespace")]
    for o in (o for o in objects if o["kind"] in CLUSTER_WIDE and o["kind"] != "Namespace"):
        if not any(_name(o).startswith(f"{namespace}-") for namespace in namespaces):
            yield f"{_id(o)}: its name does not begin with the namespace ({', '.join(namespaces)})"
    for binding in _of(objects, "ClusterRoleBinding"):
        if binding["roleRef"]["name"] not in {_name(role) for role in _of(objects, "ClusterRole")}:
            yield f"{_id(binding)}: no ClusterRole {binding['roleRef']['name']}"


def _autoscaler(scaler: Object, objects: list[Object]) -> Iterator[str]:
    target = scaler["spec"]["scaleTargetRef"]
    found = [w for w in _workloads(objects) if (w["kind"], _name(w)) == (target["kind"], target["name"])]
    if not found:
        yield f"{_id(scaler)}: no {target['kind']} {target['name']}"
    elif "replicas" in found[0]["spec"]:
        yield f"{_id(scaler)}: {_id(found[0])} has replicas of its own, which every apply would restore"
    yield from _backlog_asked_for(scaler, objects)


def _backlog_asked_for(scaler: Object, objects: list[Object]) -> Iterator[str]:
    """Yield the problems of an autoscaler that queries a series that no router exports: it would never scale, without an
    error."""
    engines = [o for o in _of(objects, "ConfigMap") if "SERVED_MODEL_NAME" in o.get("data", {})]
    served = {o["data"]["SERVED_MODEL_NAME"] for o in engines}
    for trigger in scaler["spec"].get("triggers", []):
        query = trigger["metadata"]["query"]
        if BACKLOG in query:
            asked = dict(QUERY_LABEL.findall(query))
            yield from _asked_model(scaler, asked.get("model"), served)
            if asked.get("namespace") != (namespace := scaler["metadata"].get("namespace")):
                yield f"{_id(scaler)}: asks for namespace {asked.get('namespace')}, and the routers are in {namespace}"
    for metric in scaler["spec"].get("metrics", []):
        external = metric.get("external", {}).get("metric", {})
        if external.get("name") == BACKLOG:
            model = external.get("selector", {}).get("matchLabels", {}).get("model")
            yield from _asked_model(scaler, model, served)
            if not LABEL_VALUE.fullmatch(str(model)):
                yield f"{_id(scaler)}: {model} cannot be a label's value: serve the model by another name, or use KEDA"


def _asked_model(scaler: Object, asked: str | None, served: set[str]) -> Iterator[str]:
    if served and asked not in served:
        yield f"{_id(scaler)}: asks for model {asked}, and SERVED_MODEL_NAME is {', '.join(sorted(served))}"


def _monitor(monitor: Object, objects: list[Object]) -> Iterator[str]:
    selector = monitor["spec"]["selector"]["matchLabels"]
    services = [s for s in _of(objects, "Service") if _selects(selector, s["metadata"].get("labels", {}))]
    if not services:
        yield f"{_id(monitor)}: selects no Service"
    for service in services:
        ports = {port.get("name") for port in service["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            if endpoint["port"] not in ports:
                yield f"{_id(monitor)}: {_id(service)} has no port {endpoint['port']}"


def _port_names(workload: Object) -> set[str | int]:
    ports = [port for container in containers(workload) for port in container.spec.get("ports", [])]
    return {port["name"] for port in ports if "name" in port} | {port["containerPort"] for port in ports}


def _pod_labels(workload: Object) -> Iterator[dict[str, str]]:
    """Yield the labels of a workload's pods; each pod of a StatefulSet also has its name as a label."""
    labels = workload["spec"]["template"]["metadata"]["labels"]
    yield labels
    if workload["kind"] == "StatefulSet":
        for ordinal in range(workload["spec"].get("replicas", 1)):
            yield {**labels, "statefulset.kubernetes.io/pod-name": f"{_name(workload)}-{ordinal}"}


def _matches(selector: Object, workload: Object) -> bool:
    return _selects(selector.get("matchLabels", {}), workload["spec"]["template"]["metadata"]["labels"])


def _selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def _of(objects: list[Object], kind: str) -> list[Object]:
    return [o for o in objects if o["kind"] == kind]


def _workloads(objects: list[Object]) -> list[Object]:
    return [o for o in objects if o["kind"] in WORKLOADS]


def _data(objects: list[Object], kind: str, name: str) -> dict[str, str] | None:
    for o in _of(objects, kind):
        if _name(o) == name:
            return {**o.get("data", {}), **o.get("stringData", {})}
    return None


def _name(o: Object) -> str:
    return str(o["metadata"]["name"])


def _id(o: Object) -> str:
    return f"{o['kind']}/{_name(o)}"
