"""The profile `gpu`, with a real vLLM on this machine's CPU.

Only where POINTSMAN_TEST_CONTAINERS_GPU is set: its image takes minutes and gigabytes, and needs `make env-engine`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.containers.base_images import make_archive
from tests.support.containers.clients import load, vendors
from tests.support.containers.compose import Project
from tests.support.containers.docker_host import STATE, DockerHost
from tests.support.containers.engine_image import make_engine_image
from tests.support.engines.servers import make_model
from tests.support.waiting import until

OPT_IN = "POINTSMAN_TEST_CONTAINERS_GPU"
if OPT_IN not in os.environ:
    pytest.skip("`make test-containers-gpu` runs these: minutes, and 4 GB of disk", allow_module_level=True)
pytestmark = pytest.mark.timeout(1200)
URL, MODEL = "http://127.0.0.1:8080", "tiny"


@pytest.fixture(scope="module")
def up(docker: DockerHost, project: Project) -> Iterator[Project]:
    """The running services, with a small random model in the folder of models."""
    make_engine_image(docker, make_archive(STATE))
    models = docker.root / "trees/models"
    subprocess.run(["rm", "-rf", models], check=True)
    make_model(models / MODEL)
    subprocess.run(["chown", "-R", "2000:0", models], check=True)
    project.configure(
        COMPOSE_PROFILES="gpu",
        MODEL=f"/models/{MODEL}",
        SERVED_MODEL_NAME=MODEL,
        MODEL_CACHE="/trees/models",
        MAX_MODEL_LEN="4096",
    )
    project.build()
    project.start()
    yield project
    project.compose("down", "--volumes", "--timeout=10")


def instance(project: Project) -> dict[str, Any]:
    """The only instance, as the router lists it."""
    [listed] = json.loads(project.compose("exec", "router", "pointsman", "instances", "--json"))["instances"]
    found: dict[str, Any] = listed
    return found


def test_clients_of_both_vendors_are_answered(up: Project) -> None:
    answers = vendors(up.host, URL, up.key, MODEL)
    assert set(answers) == {"openai", "openai stream", "anthropic", "anthropic stream"}
    for name, (text, end) in answers.items():
        assert (len(text.split()), end) == (8, "length" if "openai" in name else "max_tokens"), name


def test_events_and_loads_of_the_engine_arrive(up: Project) -> None:
    # Longer than a block of the CPU build (128 tokens), so that there is one to tell of.
    with load(up.host, URL, up.key, MODEL) as streams:
        streams.answers(4)
    assert not streams.failed
    until(lambda: int(instance(up).get("keys", 0)) > 0, within_s=60, what="keys by the engine's events")
    found = instance(up)
    assert found["state"] == "INSTANCE_STATE_READY"
    assert found["instance"]["prefix_mode"] == "PREFIX_MODE_EXACT"
    pushed = up.compose("exec", "agent", "python", "-c", READ.format("http://127.0.0.1:9101/metrics"))
    [steps] = [line for line in pushed.splitlines() if line.startswith("pointsman_agent_step_loads_total")]
    assert float(steps.split()[-1]) > 0, steps


READ = "import urllib.request; print(urllib.request.urlopen('{}', timeout=10).read().decode())"


def test_the_doctor_finds_nothing_to_change(up: Project) -> None:
    found = up.compose("exec", "router", "sh", "-c", "pointsman doctor 2>&1; echo status $?")
    assert found.endswith("status 0\n"), found
    assert "its tokens equal the engine's" in found


def test_the_engine_runs_without_rights_and_reads_only_its_models(up: Project) -> None:
    found = up.inspect("vllm-0")
    status = up.host.run("cat", f"/proc/{found['State']['Pid']}/status").splitlines()
    kernel = {name: value.split() for name, _, value in (line.partition(":") for line in status)}
    assert kernel["Uid"] == ["2000"] * 4
    assert {kernel[name][0].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {""}
    assert kernel["NoNewPrivs"] == ["1"]
    assert not found["NetworkSettings"]["Ports"].get("8000/tcp")
    assert up.compose("exec", "vllm-0", "sh", "-c", "ls /run/secrets 2>/dev/null || echo none") == "none\n"
