"""From the images of 0.2.0 to this tree's and back, one service at a time, while clients hold streams."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.containers.clients import load
from tests.support.containers.compose import Project, revision
from tests.support.containers.docker_host import DockerHost
from tests.support.repository import REPOSITORY

pytestmark = pytest.mark.timeout(1200)
URL = "http://127.0.0.1:8080"
RELEASED = "0.2.0"
COMMIT = "89f87ab49aeaff17fa4bb77ed875cc923c9f8c31"
# Routers first, as docs/upgrade.md says; back in the opposite order.
ENGINES = ("emulated-0", "emulated-1")
ORDER = ("router", "gateway", "agent-emulated", *ENGINES)


@pytest.fixture
def released(docker: DockerHost, project: Project) -> Iterator[Project]:
    """The running services of the released version. This tree has the same secrets."""
    has = subprocess.run(["git", "cat-file", "-e", f"{COMMIT}^{{commit}}"], cwd=REPOSITORY, capture_output=True)
    if has.returncode:
        pytest.skip(f"this clone's history has no {COMMIT[:8]}, which is {RELEASED}")
    released = revision(docker, RELEASED, COMMIT)
    released.configure(COMPOSE_PROFILES="emulated")
    released.build()
    project.configure(COMPOSE_PROFILES="emulated")
    released.adopt(project)
    released.compose("up", "--detach", "--wait")
    yield released
    project.compose("down", "--volumes", "--timeout=10")


def test_an_upgrade_and_its_way_back_lose_no_stream(released: Project, project: Project) -> None:
    with load(project.host, URL, project.key) as streams:
        streams.answers(8)
        for tree, order in ((project, ORDER), (released, ORDER[::-1])):
            for service in order:
                if service in ENGINES:
                    # As docs/upgrade.md says: streams do not go on at an engine that may be another.
                    project.compose("exec", "router", "pointsman", "drain", f"{service}:8000", "--wait", "60")
                before = released.inspect(service)["Image"]
                tree.compose("up", "--detach", "--wait", "--no-deps", service)
                assert released.inspect(service)["Image"] != before, service
                streams.answers(8)
                assert not streams.failed, f"after {service} of {tree.name}"
    print(f"\n{streams.whole} streams, none lost; refused: {streams.refused}, put off: {streams.put_off}, ", end="")
    print(f"for at most {streams.longest_refusal_s:.1f} s")
    assert not streams.failed
