"""Fixtures of the tests in containers: a Docker engine, and this tree's images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import machine
from tests.support.containers.base_images import make_base_images
from tests.support.containers.compose import Project, this_tree
from tests.support.containers.docker_host import DockerHost, docker_host
from tests.support.repository import REPOSITORY

STATE = REPOSITORY / ".state/containers"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests where the machine cannot run a Docker engine."""
    if not (own := [item for item in items if Path(__file__).parent in item.path.parents]):
        return
    try:
        machine.check()
    except machine.Unavailable as why:
        for item in own:
            item.add_marker(pytest.mark.skip(reason=f"no Docker engine on this machine: {why}"))


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerHost]:
    """A Docker engine with the images from which the project's start."""
    with docker_host(STATE, tmp_path_factory.mktemp("docker")) as host:
        make_base_images(host, STATE)
        yield host


@pytest.fixture(scope="session")
def project(docker: DockerHost) -> Project:
    """This tree, with its images built."""
    project = this_tree(docker)
    project.configure(COMPOSE_PROFILES="emulated")
    project.build()
    return project
