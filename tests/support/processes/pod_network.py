"""A network of pods on this machine: a network namespace for each, and NetworkPolicies that are enforced in it.

Each pod has an address and all of its own ports. Pods reach each other through one node, by routes; the node has the ports of the
node (hostPort) that pods have. Names are in a file that all processes see as /etc/hosts. Nothing of this machine's own network is
changed, and all ends with the processes that hold the namespaces.

It needs root, and the programs ip (iproute2), nft (nftables), unshare and nsenter (util-linux).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.support.processes.process import Process, ProcessFailure

Object = dict[str, Any]
T = TypeVar("T")

PROGRAMS = ("ip", "nft", "unshare", "nsenter")
# Addresses of the network for benchmarks, 198.18.0.0/15 (RFC 2544), which exist in the namespaces only.
NETWORK = "198.19.44"
NODE = f"{NETWORK}.1"
CLONE_NEWNET = 0x40000000
# Maximum time of a connection between two namespaces of one machine, s; one that is refused ends at once.
CONNECT_S = 10.0
# What a namespace's kernel must be able to do.
PROBE = """
ip link add probe-a type veth peer name probe-b
nft -f - <<'END'
table inet t {
  chain c { type filter hook input priority 0; ct state established accept; meta l4proto tcp reject with tcp reset; }
  chain d { type nat hook prerouting priority -100; ip daddr 198.19.44.1 tcp dport 1 dnat ip to 198.19.44.2:1; }
}
END
"""


def unavailable() -> str:
    """Return why this machine cannot have such a network; "" if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"missing programs: {', '.join(missing)} (.ci/run names the packages)"
    probe = subprocess.run(["unshare", "--net", "--mount", "sh", "-ec", PROBE], capture_output=True, text=True)
    return f"the kernel refuses: {' '.join(probe.stderr.split())}" if probe.returncode else ""


@dataclass(frozen=True)
class Member:
    """A pod in the network. `ports`: its ports by name. `holder` is the process that holds its namespace."""

    namespace: str
    labels: Mapping[str, str]
    ports: Mapping[str, int]
    address: str
    holder: Process


class PodNetwork:
    """The network. Its pods are `members`, by name. Must be stopped."""

    def __init__(self, folder: Path) -> None:
        self.members: dict[str, Member] = {}
        self._folder = folder
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n")
        # Nobody answers questions for other names, which is told at once.
        servers = folder / "resolv.conf"
        servers.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        mounts = f"mount --bind {self._hosts} /etc/hosts; mount --bind {servers} /etc/resolv.conf"
        setup = f"{mounts}; echo 1 > /proc/sys/net/ipv4/ip_forward"
        self._node = self._holder("node", setup, "--mount")
        self._node_ports: list[str] = []

    def start(self) -> None:
        """Make the node. Must be called in the main thread, as `add`."""
        _start(self._node)

    def stop(self) -> None:
        """End all namespaces. What runs in them must have ended."""
        for holder in (*(member.holder for member in self.members.values()), self._node):
            if holder.alive:
                holder.kill()

    def add(
        self,
        name: str,
        namespace: str,
        labels: Mapping[str, str],
        ports: Mapping[str, int],
        *,
        on_node: Sequence[int] = (),
    ) -> Member:
        """Add a pod, and return it. `on_node`: ports of the pod that the node has, too."""
        number = len(self.members) + 2
        address = f"{NETWORK}.{number}"
        holder = self._holder(name, "")
        _start(holder)
        self.members[name] = Member(namespace, labels, ports, address, holder)
        self._run(
            self._node,
            f"ip link add v{number} type veth peer name eth0 netns {holder.pid}",
            f"ip address add {NODE}/32 dev v{number}",
            f"ip link set v{number} up",
            f"ip route add {address}/32 dev v{number}",
        )
        self._run(
            holder,
            f"ip address add {address}/32 dev eth0",
            "ip link set eth0 up",
            f"ip route add {NODE} dev eth0",
            f"ip route add default via {NODE}",
        )
        self._node_ports += [f"ip daddr {NODE} tcp dport {port} dnat ip to {address}:{port}" for port in on_node]
        _set_chain(self._node, "type nat hook prerouting priority -100", self._node_ports)
        return self.members[name]

    def name_all(self, names: Mapping[str, str]) -> None:
        """Let the names lead to these addresses. In place, because the file is mounted."""
        self._hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items())
        )

    def command(self, name: str, words: Sequence[str], cwd: Path) -> list[str]:
        """Return the command that runs `words` in the namespace of a pod, with the network's names."""
        namespaces = [f"--mount=/proc/{self._node.pid}/ns/mnt", f"--net=/proc/{self._pid(name)}/ns/net"]
        return ["nsenter", *namespaces, "env", f"--chdir={cwd}", *words]

    def inside(self, name: str, call: Callable[[], T]) -> T:
        """Return the result of `call` in a thread whose new sockets are in a pod's network ("": in the node's)."""

        def enter_and_call() -> T:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/proc/{self._pid(name)}/ns/net") as namespace:
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return call()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter_and_call).result()

    def reaches(self, source: str, target: str, port: int) -> bool:
        """Return whether a connection from one pod to a port of another is made; False if it is refused."""

        def connect() -> bool:
            try:
                socket.create_connection((self.members[target].address, port), CONNECT_S).close()
            except ConnectionRefusedError:
                return False
            return True

        return self.inside(source, connect)

    def enforce(self, policies: Sequence[Object], namespaces: Mapping[str, Mapping[str, str]]) -> None:
        """Let these NetworkPolicies hold, and no others. `namespaces`: the labels of each namespace by its name."""
        for name, member in self.members.items():
            rules = _rules(member, policies, self.members.values(), namespaces)
            body = []
            if rules is not None:
                # Pods always accept what comes from their node, such as the kubelet's probes. Some networks drop what they do not
                # accept; a reset says the same at once.
                accepted = ["iif lo accept", "ct state established,related accept", f"ip saddr {NODE} accept", *rules]
                body = [*accepted, "meta l4proto tcp reject with tcp reset", "drop"]
            _set_chain(self.members[name].holder, "type filter hook input priority 0", body)

    def _pid(self, name: str) -> int:
        return self.members[name].holder.pid if name else self._node.pid

    def _holder(self, name: str, setup: str, *more: str) -> Process:
        script = f"{setup}\nip link set lo up\necho ready\nexec sleep infinity"
        argv = ["unshare", "--net", *more, "sh", "-ec", script]
        return Process(f"network of {name}", argv, self._folder / f"network-{name}.log")

    def _run(self, holder: Process, *commands: str) -> None:
        _checked([*_entering(holder), "sh", "-ec", "\n".join(commands)], "")


def _entering(holder: Process) -> list[str]:
    return ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]


def _set_chain(holder: Process, kind: str, rules: Sequence[str]) -> None:
    """Replace the one chain of a namespace's rules."""
    chain = "\n".join(["table inet pods {", "chain rules {", f"{kind};", *rules, "}", "}"])
    _checked([*_entering(holder), "nft", "-f", "-"], f"add table inet pods\ndelete table inet pods\n{chain}\n")


def _start(holder: Process) -> None:
    holder.start()
    holder.wait_ready(lambda: "ready" in holder.log.read_text(), within_s=30)


def _checked(words: Sequence[str], given: str) -> None:
    done = subprocess.run(words, input=given, capture_output=True, text=True)
    if done.returncode:
        raise ProcessFailure(f"{' '.join(words)}: {done.stderr}\n{given}")


def _rules(
    member: Member, policies: Sequence[Object], members: Any, namespaces: Mapping[str, Mapping[str, str]]
) -> list[str] | None:
    """Return what a pod accepts as rules of nft; None if no policy selects it, so that it accepts everything."""
    selecting = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == member.namespace
        and _selects(policy["spec"]["podSelector"], member.labels)
    ]
    if not selecting:
        return None
    rules = []
    for spec in selecting:
        assert spec["policyTypes"] == ["Ingress"], "only what comes in is limited"
        for rule in spec.get("ingress", []):
            ports = [_ports(port, member) for port in rule.get("ports", [])]
            to = f"tcp dport {{ {', '.join(ports)} }} " if ports else ""
            if "from" not in rule:
                rules.append(f"{to}accept")
                continue
            sources = {
                other.address for other in members for peer in rule["from"] if _is_peer(peer, other, member, namespaces)
            }
            if sources:
                rules.append(f"ip saddr {{ {', '.join(sorted(sources))} }} {to}accept")
    return rules


def _ports(port: Object, member: Member) -> str:
    assert port.get("protocol", "TCP") == "TCP"
    number = member.ports[port["port"]] if isinstance(port["port"], str) else port["port"]
    return f"{number}-{port['endPort']}" if "endPort" in port else str(number)


def _is_peer(peer: Object, other: Member, member: Member, namespaces: Mapping[str, Mapping[str, str]]) -> bool:
    assert peer.keys() in ({"podSelector"}, {"namespaceSelector"}), f"a peer that is not known here: {peer}"
    if "namespaceSelector" in peer:
        return _selects(peer["namespaceSelector"], namespaces[other.namespace])
    return other.namespace == member.namespace and _selects(peer["podSelector"], other.labels)


def _selects(selector: Object, labels: Mapping[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, f"a selector that is not known here: {selector}"
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
