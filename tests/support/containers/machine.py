"""What Docker engines and other roots of tests need of this machine: Debian's packages, a network, a kernel with overlay,
bridges and netfilter."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# Links between engines and this machine have addresses of the network for benchmarks, 198.18.0.0/15 (RFC 2544).
NETWORK = "198.18.213"
LINKS = 8
# Settings of pip that name nothing but an address or this machine's certificates, for other roots too.
PIP_SETTINGS = ("index-url", "extra-index-url", "cert", "trusted-host")
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
# Attempts to install a Debian, and the pause between them, s: a mirror may fail for a moment.
ATTEMPTS, PAUSE_S = 3, 20.0
PROGRAMS = ("mmdebstrap", "unshare", "nsenter", "setpriv", "ip", "iptables", "nft")
# In namespaces of its own the kernel must mount an overlay, make a bridge and a pair of links, and take the rules by which Docker
# and `network` translate addresses: with matches and targets of xtables, and of nftables alone.
PROBE = """
mount -t tmpfs tmpfs /mnt && mkdir /mnt/low /mnt/up /mnt/work /mnt/all
mount -t overlay -o lowerdir=/mnt/low,upperdir=/mnt/up,workdir=/mnt/work overlay /mnt/all
ip link add probe type bridge && ip link add probe-a type veth peer name probe-b
iptables -t nat -A POSTROUTING -s 198.18.0.0/30 ! -o probe -j MASQUERADE
iptables -t nat -A PREROUTING -m addrtype --dst-type LOCAL -p tcp --dport 80 -j DNAT --to-destination 198.18.0.2:80
iptables -A FORWARD -o probe -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
nft add table ip probe
nft 'add chain ip probe out { type nat hook postrouting priority 100 ; }'
nft add rule ip probe out ip saddr 198.18.0.2 masquerade
"""
NO_MIRROR = "apt has no mirror of Debian"


class Unavailable(Exception):
    """This machine cannot run a Docker engine; the message says why."""


def check() -> None:
    """Raise Unavailable if this machine cannot run a Docker engine."""
    if os.geteuid() != 0:
        raise Unavailable("only root can start a Docker engine")
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        raise Unavailable(f"missing programs: {', '.join(missing)} (.ci/run names the packages)")
    if not mirror():
        raise Unavailable(NO_MIRROR)
    if not os.access(FORWARDING, os.W_OK):
        raise Unavailable(f"{FORWARDING} cannot be written")
    probe = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "sh", "-ec", PROBE], capture_output=True, text=True
    )
    if probe.returncode:
        said = probe.stderr.strip().splitlines() or [f"status {probe.returncode}"]
        raise Unavailable(f"the kernel refuses: {said[-1]}")


def install(suite: str, packages: Sequence[str], target: Path, *hooks: str) -> None:
    """Install a Debian with `packages` into a folder or a .tar file, with this machine's mirror and certificates. `hooks`: shell
    commands, with the new root as their $1."""
    folder = CERTIFICATES.parent
    command = [
        *("mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join((*packages, 'ca-certificates'))}"),
        # What is interrupted is made again, so nothing has to wait for the disk.
        *('--aptopt=Acquire::Retries "3"', "--dpkgopt=force-unsafe-io"),
        *(f"--dpkgopt=path-exclude=/usr/share/{unused}/*" for unused in ("doc", "info", "locale", "man")),
        *(f"--customize-hook={hook}" for hook in (f"copy-in {CERTIFICATES} {folder}", *hooks)),
        *(f"--aptopt={line}" for line in _apt_settings()),
        *(suite, str(target), mirror()),
    ]
    for attempt in range(1, ATTEMPTS + 1):
        if target.is_dir():
            shutil.rmtree(target)
        try:
            subprocess.run(command, check=True)
        except subprocess.CalledProcessError:
            if attempt == ATTEMPTS:
                raise
            print(f"installing Debian {suite} failed, attempt {attempt} of {ATTEMPTS}", file=sys.stderr)
            time.sleep(PAUSE_S)
        else:
            return


def _apt_settings() -> list[str]:
    """Return this machine's setting of apt on lists that are older than they say, as a mirror that is a snapshot has them."""
    dumped = subprocess.run(["apt-config", "dump", "Acquire::Check-Valid-Until"], capture_output=True, text=True)
    return dumped.stdout.splitlines()


def mirror() -> str:
    """Return the mirror from which apt of this machine installs Debian; "" if there is none."""
    if not shutil.which("apt-get"):
        return ""
    line = "$(ORIGIN) $(COMPONENT) $(REPO_URI)"
    listed = subprocess.run(["apt-get", "indextargets", "--format", line], capture_output=True, text=True).stdout
    mirrors = re.findall(r"^Debian main (\S+/debian/?)$", listed, re.MULTILINE)
    return mirrors[0] if mirrors else ""


def pip_settings() -> dict[str, str]:
    """Return those of PIP_SETTINGS that this machine's pip has and that name no file or folder but the certificates."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = re.findall(r"^(?:global|:env:)\.+([a-z-]+)='(.*)'$", listed, re.MULTILINE)
    settings = {name: value for name, value in found if name in PIP_SETTINGS and "file:" not in value}
    return settings | ({"cert": str(CERTIFICATES)} if "cert" in settings else {})


def uv_settings() -> str:
    """Return a uv.toml with this machine's index, and with its certificates."""
    chosen = [f'{name} = "{value}"\n' for name, value in pip_settings().items() if name == "index-url"]
    return "".join(["system-certs = true\n", *chosen])


def copy_names(root: Path) -> None:
    """Let the system in `root` ask the name servers of this machine."""
    # A server on the loopback interface is out of reach; where systemd runs one, this file has those behind it.
    behind = Path("/run/systemd/resolve/resolv.conf")
    shutil.copy(behind if behind.exists() else "/etc/resolv.conf", root / "etc/resolv.conf")
    shutil.copy("/etc/hosts", root / "etc/hosts")


@contextmanager
def network(pid: int, root: Path) -> Iterator[None]:
    """Link the network namespace of process `pid` with this machine's network, behind its address. `root`: a folder with nft."""
    number = _new_link(pid)
    name, here, there = f"pointsman{number}", f"{NETWORK}.{4 * number + 1}", f"{NETWORK}.{4 * number + 2}"
    forwarded = FORWARDING.read_text()
    try:
        _sh(f"ip address add {here}/30 dev {name}; ip link set {name} mtu {mtu()} up")
        inside = f"nsenter --target={pid} --net ip"
        _sh(f"{inside} address add {there}/30 dev {name}; {inside} link set {name} mtu {mtu()} up")
        _sh(f"{inside} route add default via {here}")
        FORWARDING.write_text("1")
        _nft(
            root,
            f"add table ip {name}",
            f"delete table ip {name}",
            f"add table ip {name}",
            f"add chain ip {name} out {{ type nat hook postrouting priority 100 ; }}",
            f"add rule ip {name} out ip saddr {there} masquerade",
        )
        yield
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _nft(root, f"delete table ip {name}")
        subprocess.run(["ip", "link", "delete", name], capture_output=True)
        # Another engine's link may still need it.
        if not any(Path("/sys/class/net").glob("pointsman*")):
            FORWARDING.write_text(forwarded)


def _new_link(pid: int) -> int:
    """Make a pair of links with one end in the namespace of `pid`; return its number."""
    for number in range(LINKS):
        name = f"pointsman{number}"
        made = subprocess.run(
            ["ip", "link", "add", name, "type", "veth", "peer", "name", name, "netns", str(pid)], capture_output=True
        )
        if made.returncode == 0:
            return number
    raise Unavailable(f"no link to a network namespace: {made.stderr.decode().strip()}")


def mtu() -> int:
    """Return the greatest packet that this machine's way outside takes, in bytes."""
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    uplinks = [fields[0] for fields in map(str.split, routes) if fields[1] == "00000000"]
    return int(Path(f"/sys/class/net/{uplinks[0]}/mtu").read_text()) if uplinks else 1500


def _sh(script: str) -> None:
    subprocess.run(["sh", "-ec", script], check=True)


def _nft(root: Path, *commands: str) -> None:
    subprocess.run(["chroot", str(root), "nft", "-f", "-"], input="\n".join(commands) + "\n", text=True, check=True)
