"""A copy of the project inside a Docker engine, built and run by its own Dockerfiles and compose files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from tests.support.containers.docker_host import BUILD_S, DockerHost
from tests.support.repository import REPOSITORY

UP_S = 300.0
# Services of the profile `telemetry` whose programs no registry of packages has.
WITHOUT_IMAGE = ("grafana", "otel-collector")


@dataclass
class Project:
    """A tree of the project in the engine's root, in /trees/`name`."""

    host: DockerHost
    name: str

    @property
    def folder(self) -> str:
        """The folder of the compose file, in the engine's root."""
        return f"/trees/{self.name}/deploy/compose"

    def fill(self, archive: list[str]) -> None:
        """Replace the tree by the .tar file that the command `archive` prints."""
        tree = self.host.root / "trees" / self.name
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir()
        with subprocess.Popen(archive, cwd=REPOSITORY, stdout=subprocess.PIPE) as making:
            subprocess.run(["tar", "--extract", f"--directory={tree}"], stdin=making.stdout, check=True)
        assert making.returncode == 0, archive

    def configure(self, **settings: str) -> None:
        """Write .env from the example, with other `settings`, and secrets and certificates as deploy/README.md says."""
        compose = self.host.root / self.folder.lstrip("/")
        lines = (compose / ".env.example").read_text().splitlines()
        missing = settings.keys() - {line.partition("=")[0] for line in lines}
        assert not missing, f".env.example has no {missing}"
        named = [(line.partition("=")[0], line) for line in lines]
        (compose / ".env").write_text(
            "".join(f"{name}={settings[name]}\n" if name in settings else f"{line}\n" for name, line in named)
        )
        for script, folder in (("make-secrets.sh", "secrets"), ("make-certificates.sh", "tls")):
            subprocess.run([str(compose.parent / script), folder], cwd=compose, check=True)

    def adopt(self, other: Project) -> None:
        """Take the secrets of `other`."""
        own, others = (self.host.root / each.folder.lstrip("/") / "secrets" for each in (self, other))
        shutil.rmtree(own)
        shutil.copytree(others, own)

    def compose(self, *words: str, within_s: float = UP_S, check: bool = True) -> str:
        """Run `docker compose` in its folder; return its stdout."""
        return self.host.run("docker", "compose", *words, folder=self.folder, within_s=within_s, check=check)

    def start(self) -> None:
        """Start the services of the profiles that have images here, or start them again, and wait until they are healthy."""
        services = self.compose("config", "--services").split()
        self.compose("up", "--detach", "--wait", *(name for name in services if name not in WITHOUT_IMAGE))

    def build(self) -> None:
        """Build all images of the profile. A second attempt goes on where the first has failed, perhaps at a download."""
        try:
            self.compose("build", within_s=BUILD_S)
        except AssertionError as failed:
            print(f"building failed, once more:\n{failed}", file=sys.stderr)
            self.compose("build", within_s=BUILD_S)

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what `docker inspect` says of a service's container, also of one that has ended."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        found: dict[str, Any] = json.loads(self.host.docker("inspect", container))[0]
        return found

    def crash(self, service: str) -> None:
        """Kill a service's process as the kernel does. `docker kill` tells Docker that the container is to stay down, too."""
        self.host.run("sh", "-c", f"kill -KILL {self.inspect(service)['State']['Pid']}")

    def logs(self, service: str) -> list[str]:
        """Return the lines that a service's container has written."""
        return self.host.run("sh", "-c", f"docker logs {self.inspect(service)['Id']} 2>&1").splitlines()

    def secret(self, name: str) -> str:
        """Return the content of a file of secrets."""
        return (self.host.root / self.folder.lstrip("/") / "secrets" / name).read_text().strip()

    @property
    def key(self) -> str:
        """The first API key."""
        return self.secret("api-keys").splitlines()[0].partition(":")[2]


def this_tree(host: DockerHost) -> Project:
    """Return the project as it is in this checkout, with changes that are not committed."""
    project = Project(host, "now")
    listed = "git ls-files -z --cached --others --exclude-standard | tar --create --null --no-recursion --files-from=-"
    project.fill(["sh", "-c", f"{listed} --ignore-failed-read"])
    return project


def revision(host: DockerHost, name: str, commit: str) -> Project:
    """Return the project as it was at `commit`."""
    project = Project(host, name)
    project.fill(["git", "archive", commit])
    return project
