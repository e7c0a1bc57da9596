"""Runs the pods of a Kubernetes overlay as processes, with the entry points and environment of their images, and the commands,
environment, files, volumes, probes and pre-stop hooks of their manifests.

Only the work of kubelet, network and images is replaced:

- A container is a process. Its environment has only its own variables, PATH, HOME and what Python needs to find this checkout.
- A volume is a folder, and its mount path is replaced by the folder's path (`Pod.local`). Secrets and config maps are files in
  their folders.
- A port is replaced by a free one of this machine. NAME:PORT of a Service, or of a pod of a headless Service, is replaced by
  127.0.0.1 and that port. With a PodNetwork nothing of this is replaced: each pod has its address and its ports, and the names of
  Services lead to it.
- The hub of models is the test's own (HF_ENDPOINT, which clusters without the public hub set, too).
- `redis-server`, `redis-cli` and `vllm` are programs of this machine. `vllm` is the CPU build, with the flags of
  tests/support/engines/cpu_program.py in addition to all of the manifests' flags; or, with `emulated`, an emulated engine that
  publishes its KV events where these flags say.

Users, read-only root file systems, limits, GPUs and image pulls are absent; so are network policies without a PodNetwork.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import leaks
from tests.support.engines.cpu_program import vllm_program
from tests.support.engines.servers import ENGINE_PYTHON
from tests.support.http_request import ask
from tests.support.processes.pod_network import NODE, PodNetwork
from tests.support.processes.process import Process, ProcessFailure, free_port
from tests.support.waiting import until
from tools import check_deploy
from tools.deploy_checks import k8s

Object = dict[str, Any]
BIN = Path(sys.executable).parent
# Timeout of a probe, s.
PROBE_S = 5.0


EMULATED_VLLM = f"""#!/bin/sh
PYTHONPATH={check_deploy.ROOT} exec {sys.executable} -m tests.support.processes.emulated_vllm "$@"
"""


@dataclass
class Cluster:
    """The rendered objects of an overlay, and the pods that a test adds. `folder` holds volumes and logs; `hub` is the base URL
    of the hub of models. `network`: where the pods have addresses of their own. `emulated`: engines are emulated."""

    objects: list[Object]
    folder: Path
    hub: str
    network: PodNetwork | None = None
    emulated: bool = False
    pods: dict[str, Pod] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bin_folder = self.folder / "bin"
        bin_folder.mkdir(parents=True)
        self.redis_port = free_port()
        server, client = (
            shutil.which(name, path="/usr/bin:/usr/local/bin:/opt/homebrew/bin") or BIN / name
            for name in ("redis-server", "redis-cli")
        )
        here = f" --bind 127.0.0.1 --port {self.redis_port}" if self.network is None else ""
        port = f" -p {self.redis_port}" if self.network is None else ""
        programs = {
            "redis-server": f'#!/bin/sh\nexec {server} "$@"{here}\n',
            # The client of the tests is too old for -e, which makes an error reply a failure.
            "redis-cli": f'#!/bin/sh\n[ "$1" != -e ] || shift\nexec {client}{port} "$@"\n',
            "vllm": EMULATED_VLLM if self.emulated else vllm_program(str(ENGINE_PYTHON)),
        }
        for name, text in programs.items():
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)

    def workload(self, name: str) -> Object:
        """Return the only workload of that name."""
        [found] = [
            resource
            for resource in self.objects
            if resource["kind"] in k8s.WORKLOADS and resource["metadata"]["name"] == name
        ]
        return found

    def add(self, workload: str, name: str) -> Pod:
        """Add a pod of a workload, not started. Pods of a StatefulSet are named NAME-0 and so on."""
        self.pods[name] = Pod(self, self.workload(workload), name)
        return self.pods[name]

    def secret(self, name: str, key: str) -> str:
        """Return a secret's value."""
        data = self.data("Secret", name)
        assert data is not None, f"no Secret {name}"
        return data[key]

    def data(self, kind: str, name: str) -> dict[str, str] | None:
        """Return the data of a ConfigMap or Secret, or None. Its real name may end in the hash that kustomize appends."""
        for resource in self.objects:
            if resource["kind"] == kind and re.fullmatch(
                rf"{re.escape(name)}(-[0-9a-z]{{10}})?", resource["metadata"]["name"]
            ):
                if kind == "Secret":
                    return {key: base64.b64decode(value).decode() for key, value in resource.get("data", {}).items()}
                return dict(resource.get("data", {}))
        return None

    def addresses(self) -> dict[str, int]:
        """Return NAME:PORT by which pods reach each other -> port on this machine.

        A Service of several pods is not included: it has no single port, and no pod here connects to one by its name.
        """
        found: dict[str, int] = {}
        for service in (resource for resource in self.objects if resource["kind"] == "Service"):
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            chosen = [pod for pod in self.pods.values() if service["spec"]["selector"].items() <= pod.labels.items()]
            headless = service["spec"].get("clusterIP") == "None"
            for pod in chosen:
                names = [f"{pod.name}.{name}.{namespace}.svc"] if headless else []
                names += [name, f"{name}.{namespace}.svc"] if len(chosen) == 1 else []
                for port in service["spec"]["ports"]:
                    here = pod.port(port.get("targetPort", port["port"]))
                    # The name of a pod stands for that pod's own port.
                    found |= {f"{name}:{port['port']}": here for name in names}
        return found

    def name_pods(self) -> None:
        """Let the names of Services, and of pods of headless Services, lead to the pods that were added. Only with a network."""
        assert self.network is not None
        found: dict[str, str] = {}
        for service in (resource for resource in self.objects if resource["kind"] == "Service"):
            name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
            for pod in self.pods.values():
                if service["spec"]["selector"].items() <= pod.labels.items():
                    each = [name, f"{name}.{namespace}.svc", f"{pod.name}.{name}.{namespace}.svc"]
                    found |= {label: self.network.members[pod.name].address for label in each if label not in found}
        self.network.name_all(found)

    def enforce_policies(self, namespaces: Mapping[str, Mapping[str, str]]) -> None:
        """Let the overlay's NetworkPolicies hold. `namespaces`: labels of further namespaces, by their names."""
        assert self.network is not None
        own = {o["metadata"]["name"]: o["metadata"].get("labels", {}) for o in self.objects if o["kind"] == "Namespace"}
        self.network.enforce([o for o in self.objects if o["kind"] == "NetworkPolicy"], {**own, **namespaces})

    def stop(self) -> None:
        """Kill all pods, in reverse order."""
        for pod in reversed(self.pods.values()):
            pod.kill()


@dataclass
class Pod:
    """One pod of `workload`, with its containers as processes and free ports of this machine in place of its ports."""

    cluster: Cluster
    workload: Object
    name: str
    containers: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = self.workload["spec"]["template"]["spec"]
        self.labels = {
            **self.workload["spec"]["template"]["metadata"]["labels"],
            "statefulset.kubernetes.io/pod-name": self.name,
        }
        self.namespace = self.workload["metadata"]["namespace"]
        self._ports: dict[int, int] = {}
        self._names: dict[str, int] = {}
        on_node = []
        for container in self.spec["containers"]:
            for port in container.get("ports", []):
                inside = port["containerPort"]
                self._names[port.get("name", "")] = inside
                if self.cluster.network is None:
                    self._ports[inside] = self.cluster.redis_port if port.get("name") == "redis" else free_port()
                else:
                    self._ports[inside] = inside
                    on_node += [inside] if "hostPort" in port else []
        if self.cluster.network is not None:
            self.cluster.network.add(self.name, self.namespace, self.labels, self._names, on_node=on_node)

    def port(self, inside: int | str) -> int:
        """Return the port of this machine that stands for a port of the pod, given by number or name."""
        return self._ports[self._names[inside] if isinstance(inside, str) else inside]

    @property
    def ports(self) -> dict[int, str]:
        """The pod's ports, each with its name or ""."""
        named = {number: name for name, number in self._names.items()}
        return {number: named.get(number, "") for number in self._ports}

    def url(self, port: int | str) -> str:
        """Return the base URL of one of the pod's ports."""
        return f"http://{self.address}:{self.port(port)}"

    @property
    def address(self) -> str:
        """The pod's address; the loopback address without a network."""
        return "127.0.0.1" if self.cluster.network is None else self.cluster.network.members[self.name].address

    def prepare(self) -> None:
        """Make the volumes and the processes of the containers, without a start. The calling fixture owns the processes.

        The pods to which the containers connect must have been added.
        """
        for volume in [*self.spec.get("volumes", []), *self.workload["spec"].get("volumeClaimTemplates", [])]:
            self._make(volume)
        for container in self.spec["containers"]:
            self.containers[container["name"]] = Process(
                f"{self.name}/{container['name']}",
                self._in_network([self.local(container, word) for word in self._words(container)]),
                self.cluster.folder / f"{self.name}-{container['name']}.log",
                self.environment(container),
                self.cluster.folder,
                only_env=True,
            )

    def start(self) -> None:
        """Start all containers."""
        if not self.containers:
            self.prepare()
        for process in self.containers.values():
            process.start()

    @property
    def alive(self) -> bool:
        """Whether all containers run."""
        return bool(self.containers) and all(process.alive for process in self.containers.values())

    def ready(self) -> bool:
        """Return whether all startup and readiness probes pass. Raises ProcessFailure if a container has ended."""
        for process in self.containers.values():
            if not process.alive:
                raise ProcessFailure(f"{process.name} ended\n{process.tail()}")
        return all(
            self.probe(container, container[kind])
            for container in self.spec["containers"]
            for kind in ("startupProbe", "readinessProbe")
            if kind in container
        )

    def wait_ready(self, within_s: float = 240) -> None:
        """Wait until the pod is ready. Raises ProcessFailure with the logs' end if a container ends, or after `within_s`."""
        try:
            until(self.ready, within_s=within_s, what=f"{self.name} ready")
        except ProcessFailure:
            raise
        except AssertionError as late:
            tails = "\n".join(process.tail() for process in self.containers.values())
            raise ProcessFailure(f"{late}\n{tails}") from None

    def probe(self, container: Object, probe: Object) -> bool:
        """Return whether a probe of the container passes."""
        network = self.cluster.network
        if network is None or "exec" in probe:
            return self._probe(container, probe)
        return network.inside("", lambda: self._probe(container, probe))

    def _probe(self, container: Object, probe: Object) -> bool:
        if "httpGet" in probe:
            try:
                url = self.url(probe["httpGet"]["port"]) + probe["httpGet"]["path"]
                return 200 <= ask(url, timeout_s=PROBE_S).status < 400
            except OSError:
                return False
        if "tcpSocket" in probe:
            with socket.socket() as tried:
                return tried.connect_ex((self.address, self.port(probe["tcpSocket"]["port"]))) == 0
        return self._execute(container, probe["exec"]["command"]) == 0

    def delete(self) -> dict[str, int]:
        """End the pod as kubelet does (hooks, SIGTERM, SIGKILL after the grace period); return exit status by container."""
        # Kubelet ends containers in parallel, so those without a hook get SIGTERM at once.
        ordered = sorted(self.spec["containers"], key=lambda container: "lifecycle" in container)
        statuses = {}
        for container in ordered:
            if hook := container.get("lifecycle", {}).get("preStop"):
                self._execute(container, hook["exec"]["command"])
            process = self.containers[container["name"]]
            statuses[container["name"]] = process.stop(within_s=self.spec["terminationGracePeriodSeconds"])
        del self.cluster.pods[self.name]
        return statuses

    def kill(self) -> None:
        """Kill the containers that run."""
        for process in self.containers.values():
            if process.alive:
                process.kill()

    def log(self, container: str) -> str:
        """Return a container's log."""
        return self.containers[container].log.read_text(errors="replace")

    def environment(self, container: Object) -> dict[str, str]:
        """Return a container's environment: the variables of image and manifest, with local values, and the paths of programs."""
        own = {name: self.local(container, value) for name, value in self._given(container).items()}
        machine = {
            "PATH": f"{self.cluster.folder / 'bin'}:{BIN}:{os.environ['PATH']}",
            "HOME": str(self.cluster.folder),
            "HF_ENDPOINT": self.cluster.hub,
            leaks.MARK: os.environ[leaks.MARK],
        }
        if container["image"].startswith("pointsman-") and (path := os.environ.get("PYTHONPATH")):
            machine["PYTHONPATH"] = path
        return {**own, **machine}

    def local(self, container: Object, text: str) -> str:
        """Return `text` of a container with this machine's paths, addresses and ports."""
        mounts = {mount["mountPath"]: self._volume(mount["name"]) for mount in container.get("volumeMounts", [])}
        if mounts:
            # In one pass: the path of a folder here may begin with a mount path, such as /tmp.
            paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
            text = re.sub(rf"(?:(?<![\w./-])|(?<=://))({paths})(?![\w-])", lambda m: str(mounts[m[1]]), text)
        if self.cluster.network is not None:
            return text
        for address, here in self.cluster.addresses().items():
            text = re.sub(rf"(?<![\w.-]){re.escape(address)}\b", f"127.0.0.1:{here}", text)
        for inside, here in self._ports.items():
            text = re.sub(rf"\b(0\.0\.0\.0|127\.0\.0\.1):{inside}\b", rf"\g<1>:{here}", text)
            text = re.sub(rf"(\btcp://\*:|^--port=){inside}\b", rf"\g<1>{here}", text)
        return text

    def _words(self, container: Object) -> list[str]:
        command = container.get("command") or _image(container["image"])[0]
        given = self._given(container)
        return [
            re.sub(r"\$\((\w+)\)", lambda m: given.get(m[1], m[0]), word)
            for word in [*command, *container.get("args", [])]
        ]

    def _given(self, container: Object) -> dict[str, str]:
        """Return the container's environment as it is in the cluster."""
        env = dict(_image(container["image"])[1])
        for source in container.get("envFrom", []):
            [(kind, reference)] = source.items()
            found = self.cluster.data({"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], reference["name"])
            assert found is not None, f"{self.name}: no {reference['name']}"
            env |= found
        for entry in container.get("env", []):
            value = entry["value"] if "value" in entry else self._value_from(entry["valueFrom"])
            if value is not None:
                env[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), value)
        return env

    def _value_from(self, source: Object) -> str | None:
        [(kind, reference)] = source.items()
        if kind == "fieldRef":
            node = "127.0.0.1" if self.cluster.network is None else NODE
            fields = {"metadata.name": self.name, "metadata.namespace": self.namespace, "status.hostIP": node}
            return str(fields[reference["fieldPath"]])
        found = self.cluster.data({"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}[kind], reference["name"])
        if found is None or reference["key"] not in found:
            assert reference.get("optional"), f"{self.name}: no {reference['key']} in {reference['name']}"
            return None
        return found[reference["key"]]

    def _volume(self, name: str) -> Path:
        return self.cluster.folder / self.name / name

    def _make(self, volume: Object) -> None:
        folder = self._volume(volume.get("name") or volume["metadata"]["name"])
        folder.mkdir(parents=True, exist_ok=True)
        for kind, source in (("Secret", volume.get("secret")), ("ConfigMap", volume.get("configMap"))):
            if source is None:
                continue
            data = self.cluster.data(kind, source.get("secretName") or source["name"])
            assert data is not None or source.get("optional"), f"{self.name}: no {kind} for {folder.name}"
            items = {item["key"]: item["path"] for item in source.get("items", [])} or {key: key for key in data or {}}
            for key, path in items.items():
                (folder / path).write_text((data or {})[key])

    def _execute(self, container: Object, command: list[str]) -> int:
        return self.execute(container, command).returncode

    def execute(self, container: Object, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as `kubectl exec` does; return it with its output."""
        words = self._in_network([self.local(container, word) for word in command])
        return subprocess.run(words, env=self.environment(container), capture_output=True, text=True, check=False)

    def _in_network(self, words: list[str]) -> list[str]:
        network = self.cluster.network
        return words if network is None else network.command(self.name, words, self.cluster.folder)


def _image(name: str) -> tuple[list[str], Mapping[str, str]]:
    """Return an image's entry point and environment from its Dockerfile; empty for other projects' images."""
    name = name.rpartition("/")[2].partition(":")[0]
    if not name.startswith("pointsman-"):
        return [], {}
    engine = name == "pointsman-engine"
    text = (check_deploy.DEPLOY / "docker" / ("engine.Dockerfile" if engine else "Dockerfile")).read_text()
    [entry_point] = re.findall(r"^ENTRYPOINT \[(.+)\]$", text, re.MULTILINE)
    pairs = (pair.split("=", 1) for line in re.findall(r"^ENV (.+)$", text, re.MULTILINE) for pair in line.split())
    return re.findall(r'"([^"]+)"', entry_point), {name: value for name, value in pairs if name != "PATH"}
