"""Stand-ins of the images that the project's Dockerfiles and compose files name, made of Debian's packages.

One Debian 12 with Python 3.11, Redis 7.0 and Prometheus 2.42 stands for `python` (3.11), `redis` (8.2) and `prom/prometheus`
(3.5). Its pip and uv use this machine's index and certificates.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import yaml

from tests.support.containers import machine
from tests.support.containers.docker_host import BUILD_S, ENVIRONMENT, DockerHost
from tests.support.repository import REPOSITORY

SUITE = "bookworm"
# wget is what Prometheus' image has for its health check; the libraries are what vLLM's CPU build loads.
PACKAGES = (
    "python3",
    "python3-pip",
    "python3-venv",
    "python-is-python3",
    "redis-server",
    "prometheus",
    "wget",
    "libnuma1",
    "libgomp1",
)
REDIS_USER, PROMETHEUS_USER = "999:1000", "65534:65534"


def make_archive(state: Path) -> Path:
    """Return the root of the images as a .tar file, which is made if it is missing."""
    settings, uv_toml = machine.pip_settings(), machine.uv_settings()
    # pip of the real image installs where Debian's wants to be asked.
    pip_conf = "\n".join(["[global]", "break-system-packages = true", *(f"{k} = {v}" for k, v in settings.items())])
    key = hashlib.sha256(" ".join((*PACKAGES, pip_conf, uv_toml)).encode()).hexdigest()[:8]
    archive = state / f"base-{SUITE}-{key}.tar"
    if not archive.exists():
        for old in state.glob("base-*.tar"):
            old.unlink()
        part = state / f"part-{SUITE}.tar"
        pip, uv = state / "pip.conf", state / "uv.toml"
        pip.write_text(pip_conf)
        uv.write_text(uv_toml)
        machine.install(
            SUITE,
            PACKAGES,
            part,
            f"copy-in {pip} /etc",
            f'mkdir "$1/etc/uv"; cp {uv} "$1/etc/uv"',
            f'install -d -o {REDIS_USER.replace(":", " -g ")} "$1/data"',
            f'install -d -o {PROMETHEUS_USER.replace(":", " -g ")} "$1/prometheus"',
        )
        part.rename(archive)
    return archive


def make_base_images(host: DockerHost, archive: Path) -> None:
    """Give the engine the images from which the project's own start. `archive`: what make_archive returned."""
    base = f"stand-in:{archive.stem}"
    path = f"ENV PATH={ENVIRONMENT['PATH']}"
    known = host.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "stand-in").split()
    if base not in known:
        if known:
            host.docker("rmi", "--force", *known)
        with archive.open("rb") as root:
            subprocess.run(
                host.command("docker", "import", "--change", path, "-", base),
                stdin=root,
                stdout=subprocess.DEVNULL,
                env=ENVIRONMENT,
                check=True,
                timeout=BUILD_S,
            )
    for name, declared in _names().items():
        host.build(name, f"FROM {base}", *declared)


def _names() -> dict[str, list[str]]:
    """Return the names of the images, with what their own Dockerfiles declare."""
    version = re.search(r"^ARG PYTHON=(\S+)$", (REPOSITORY / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    assert version, "deploy/docker/Dockerfile names no Python"
    services = yaml.safe_load((REPOSITORY / "deploy/compose/compose.yaml").read_text())["services"]
    return {
        f"python:{version[1]}": [],
        services["redis"]["image"]: ["VOLUME /data", "WORKDIR /data"],
        services["prometheus"]["image"]: ["VOLUME /prometheus", "WORKDIR /prometheus"],
    }
