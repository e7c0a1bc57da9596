"""Stand-ins of the images that the project's Dockerfiles and compose files name, made of Debian's packages.

One Debian 12 with Python 3.11 and Redis 7.0 stands for `python` (3.11) and for `redis` (8.2). Its pip and uv use this machine's
index and certificates.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from tests.support.containers import machine
from tests.support.containers.docker_host import BUILD_S, ENVIRONMENT, DockerHost
from tests.support.repository import REPOSITORY

SUITE = "bookworm"
PACKAGES = ("python3", "python3-pip", "python3-venv", "python-is-python3", "redis-server")
REDIS_USER = "999:1000"


def make_base_images(host: DockerHost, state: Path) -> None:
    """Give the engine the images from which the project's own start, unless it has them."""
    for name, changes in _names().items():
        if host.docker("image", "inspect", "--format", "{{.Id}}", name, check=False).strip():
            continue
        with _archive(state).open("rb") as archive:
            words = [word for change in changes for word in ("--change", change)]
            subprocess.run(
                host.command("docker", "import", *words, "-", name),
                stdin=archive,
                stdout=subprocess.DEVNULL,
                env=ENVIRONMENT,
                check=True,
                timeout=BUILD_S,
            )


def _names() -> dict[str, list[str]]:
    """Return the names of the images, with what their own Dockerfiles declare."""
    version = re.search(r"^ARG PYTHON=(\S+)$", (REPOSITORY / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)
    assert version, "deploy/docker/Dockerfile names no Python"
    services = yaml.safe_load((REPOSITORY / "deploy/compose/compose.yaml").read_text())["services"]
    path = f"ENV PATH={ENVIRONMENT['PATH']}"
    return {f"python:{version[1]}": [path], services["redis"]["image"]: [path, "VOLUME /data", "WORKDIR /data"]}


def _archive(state: Path) -> Path:
    """Return the root of the images as a .tar file, which is made if it is missing."""
    archive = state / f"base-{SUITE}.tar"
    if not archive.exists():
        part = state / f"part-{SUITE}.tar"
        pip, uv = state / "pip.conf", state / "uv.toml"
        settings = machine.pip_settings()
        # pip of the real image installs where Debian's wants to be asked.
        pip.write_text(
            "\n".join(["[global]", "break-system-packages = true", *(f"{k} = {v}" for k, v in settings.items())])
        )
        uv.write_text(machine.uv_settings())
        machine.install(
            SUITE,
            PACKAGES,
            part,
            f"copy-in {pip} /etc",
            f'mkdir "$1/etc/uv"; cp {uv} "$1/etc/uv"',
            f'install -d -o {REDIS_USER.replace(":", " -g ")} "$1/data"',
        )
        part.rename(archive)
    return archive
