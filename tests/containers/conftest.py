"""Fixtures of the tests in containers: a Docker engine, and this tree's images."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache

import pytest

from tests.support.containers import machine
from tests.support.containers.base_images import make_archive, make_base_images
from tests.support.containers.compose import Project, this_tree
from tests.support.containers.docker_host import STATE, DockerHost, docker_host, locked


@cache
def _problem() -> str:
    """Return why the machine cannot run a Docker engine; empty if it can."""
    try:
        machine.check()
    except machine.Unavailable as why:
        return str(why)
    return ""


def pytest_runtest_setup() -> None:
    """Skip the tests where the machine cannot run a Docker engine. Not in a fixture: the report has one line for all of them."""
    if why := _problem():
        pytest.skip(f"no Docker engine on this machine: {why}")


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerHost]:
    """A Docker engine with the images from which the project's start."""
    with ExitStack() as stack:
        stack.enter_context(locked(STATE))
        thread = stack.enter_context(ThreadPoolExecutor(1))
        # Beside the engine's own root: both wait for downloads.
        archive = thread.submit(make_archive, STATE)
        try:
            host = stack.enter_context(docker_host(STATE, tmp_path_factory.mktemp("docker")))
        except machine.Unavailable as why:
            pytest.skip(f"no Docker engine on this machine: {why}")
        make_base_images(host, archive.result())
        yield host


@pytest.fixture(scope="session")
def project(docker: DockerHost) -> Project:
    """This tree, with its images built."""
    project = this_tree(docker)
    project.configure(COMPOSE_PROFILES="emulated")
    project.build()
    return project
