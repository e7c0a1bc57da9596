"""Fixtures of the tests in containers: a Docker engine, and this tree's images."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.containers import machine
from tests.support.containers.base_images import make_base_images
from tests.support.containers.compose import Project, this_tree
from tests.support.containers.docker_host import DockerHost, docker_host
from tests.support.repository import REPOSITORY

STATE = REPOSITORY / ".state/containers"


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerHost]:
    """A Docker engine with the images from which the project's start. Skips the test where the machine cannot run one."""
    try:
        machine.check()
    except machine.Unavailable as why:
        pytest.skip(f"no Docker engine on this machine: {why}")
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
