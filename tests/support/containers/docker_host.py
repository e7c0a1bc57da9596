"""A Docker engine of Debian's packages, with a root, processes and a network of its own, for tests of images and compose files.

The engine is installed into a folder, and needs nothing on the machine but mmdebstrap and the rights of root. The folder and all
images stay in .state/containers for the next run; everything else ends with the engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.containers import machine
from tests.support.processes.process import Process
from tests.support.repository import REPOSITORY

# Where root, images and layers stay for the next run.
STATE = REPOSITORY / ".state/containers"
SCRIPT = Path(__file__).with_name("namespaces.sh")
PACKAGES = (
    "mount",
    "docker.io",
    "docker-cli",
    "docker-compose",
    "docker-buildx",
    "iptables",
    "nftables",
    "iproute2",
    "tini",
)
# The program by which Docker gives a container NVIDIA's GPUs, which here are none. It gets the container's state.
GPU_HOOK = "#!/bin/sh\nexec cat > /dev/null\n"
# Programs of containers see nothing of this process's environment.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
# Maximum times of one command and of a build, s.
COMMAND_S, BUILD_S = 120.0, 600.0
# Bytes of layers that no image uses, which the next run may use.
KEPT_LAYERS = "4GB"


@dataclass
class DockerHost:
    """A running engine. `root`: its root folder; `pid`: the first process of its namespaces."""

    root: Path
    pid: int
    _log: Path = field(repr=False)

    def command(self, *words: str, folder: str = "/") -> list[str]:
        """Return the command that runs `words` in the engine's namespaces and root."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--ipc", "--uts", "--root", "--wd"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', folder, *words]

    def run(self, *words: str, folder: str = "/", within_s: float = COMMAND_S, check: bool = True) -> str:
        """Run a command in the engine's namespaces; return its stdout. Raises AssertionError with its stderr if it fails and
        `check`."""
        done = subprocess.run(
            self.command(*words, folder=folder), env=ENVIRONMENT, capture_output=True, text=True, timeout=within_s
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def docker(self, *words: str, within_s: float = COMMAND_S, check: bool = True) -> str:
        """Run a command of Docker's own client; return its stdout."""
        return self.run("docker", *words, within_s=within_s, check=check)

    def build(self, name: str, *lines: str) -> None:
        """Build an image from the lines of a Dockerfile that copies no files."""
        subprocess.run(
            self.command("docker", "build", "--quiet", "--tag", name, "-"),
            input="\n".join(lines),
            text=True,
            stdout=subprocess.DEVNULL,
            env=ENVIRONMENT,
            check=True,
            timeout=BUILD_S,
        )

    def get_json(self, url: str) -> Any:
        """Return what a published port answers."""
        script = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
        done = subprocess.run(
            self.client(sys.executable, "-c", script, url),
            check=True,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        return json.loads(done.stdout)

    def client(self, *words: str) -> list[str]:
        """Return the command that runs a program of this machine in the engine's network, where published ports are."""
        return ["nsenter", f"--target={self.pid}", "--net", "setpriv", "--pdeathsig", "KILL", *words]


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Keep other runs away from `state`, which is made if it is missing. Raises RuntimeError if one uses it."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(f"another run of these tests uses {state}") from None
        yield


@contextmanager
def docker_host(state: Path, logs: Path) -> Iterator[DockerHost]:
    """Start a Docker engine whose root, layers and images stay in `state`; end it, and all of its containers.

    Raises machine.Unavailable if there is no way from it to this machine's network.
    """
    with ExitStack() as stack:
        root = _root(state)
        data = state / "docker"
        data.mkdir(exist_ok=True)
        machine.copy_names(root)
        cgroup = f"/pointsman-{os.getpid()}"
        stack.callback(_remove_cgroups)
        process = Process(
            "dockerd",
            # unshare ignores SIGTERM; if it is killed, the kernel ends all processes of the namespaces.
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"),
                *("--kill-child", "sh", str(SCRIPT), str(root), str(data), cgroup, str(machine.mtu())),
            ],
            logs / "dockerd.log",
            env=ENVIRONMENT,
            only_env=True,
        )
        process.start()
        stack.callback(process.kill)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        process.wait_ready(lambda: bool(children.read_text()), within_s=10)
        host = DockerHost(root, int(children.read_text()), process.log)
        stack.enter_context(machine.network(host.pid, root))
        process.wait_ready(lambda: bool(_version(host)), within_s=60)
        # The engine starts again what a run that was killed has left.
        _remove_containers(host)
        try:
            yield host
        finally:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                _clean(host)
            os.kill(host.pid, signal.SIGTERM)
            process.stop(within_s=30)


def _version(host: DockerHost) -> str:
    return host.docker("version", "--format", "{{.Server.Version}}", check=False).strip()


def _clean(host: DockerHost) -> None:
    """Remove all containers, volumes and networks, and layers beyond KEPT_LAYERS."""
    _remove_containers(host)
    host.docker("volume", "prune", "--all", "--force")
    host.docker("network", "prune", "--force")
    host.docker("image", "prune", "--force")
    host.docker("builder", "prune", "--force", "--keep-storage", KEPT_LAYERS)


def _remove_containers(host: DockerHost) -> None:
    if containers := host.docker("ps", "--all", "--quiet").split():
        host.docker("rm", "--force", "--volumes", *containers)


def _root(state: Path) -> Path:
    """Return the folder with the engine's programs, which is made if it is missing."""
    suite = "trixie"
    root = state / f"root-{suite}-{hashlib.sha256(' '.join((*PACKAGES, GPU_HOOK)).encode()).hexdigest()[:8]}"
    if not root.exists():
        for old in state.glob("root-*"):
            shutil.rmtree(old)
        part = state / "root-part"
        machine.install(suite, PACKAGES, part)
        (part / "var/lib/docker").mkdir()
        (part / "trees").mkdir()
        hook = part / "usr/local/bin/nvidia-container-runtime-hook"
        hook.write_text(GPU_HOOK)
        hook.chmod(0o755)
        part.rename(root)
    return root


def _remove_cgroups() -> None:
    """Remove the groups of engines that have ended; the kernel keeps those that have processes."""
    for top in Path("/sys/fs/cgroup").glob("**/pointsman-*"):
        for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            top.rmdir()
