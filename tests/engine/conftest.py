"""Fixtures of the tests on real vLLM: a model, two engines and one control plane, shared by the whole session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.engines.fault_switches import installed
from tests.support.engines.preloaded import preloaded
from tests.support.engines.servers import (
    ADAPTER,
    ENGINE_PYTHON,
    Engine,
    EngineSpec,
    make_model,
    running_engines,
    vllm_names,
)
from tests.support.engines.vllm_questions import Vllm, asking_vllm
from tests.support.processes.control_plane import ControlPlane

# An engine with /sleep, /pause and /load_lora_adapter.
SWITCHABLE = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture(scope="session")
def engine_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model, the logs and the agent's state live."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session", autouse=True)
def starts_in_seconds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines are forks of a process that has loaded vLLM."""
    if not ENGINE_PYTHON.exists():
        pytest.fail(f"{ENGINE_PYTHON} is missing: `make test` makes it (requirements/engine.lock)", pytrace=False)
    with preloaded(ENGINE_PYTHON, tmp_path_factory.mktemp("preloaded")):
        yield


@pytest.fixture(scope="session")
def model_folder(engine_folder: Path) -> Path:
    """A folder with the small random model of tests/support/engines/model.py; its folder "adapter" holds a LoRA adapter of it."""
    folder = engine_folder / "model"
    return make_model(folder, folder / "adapter")


@pytest.fixture(scope="session")
def vllm(engine_folder: Path) -> Iterator[Vllm]:
    """vLLM's own modules, called without an engine."""
    with asking_vllm(engine_folder / "inside.log") as vllm:
        yield vllm


@pytest.fixture(scope="session")
def site(engine_folder: Path) -> Path:
    """A folder for engines' PYTHONPATH: the connector package and the faulty connector."""
    return installed(engine_folder / "connector")


@pytest.fixture(scope="session")
def engines(model_folder: Path, engine_folder: Path) -> Iterator[list[Engine]]:
    """Two real vLLM servers of one model.

    They differ in what may differ between instances of one pool: block size, KV capacity, and how event ports are chosen.
    """
    # Tool calls in all their forms, and a LoRA adapter.
    more: tuple[str, ...] = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-lora")
    more += ("--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={model_folder / 'adapter'}")
    # A random model ends a forced call only if no blanks are allowed. The scale-out API gives the tests a prompt's tokens.
    more += ("--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}))
    if vllm_names("enable_scale_out"):
        more += ("--enable-scale-out",)
    specs = (
        EngineSpec("a", block_size=32, fixed_event_ports=False, extra_args=more),
        EngineSpec("b", block_size=64, kv_capacity_tokens=8_192, extra_args=more, env=SWITCHABLE),
    )
    with running_engines(specs, model_folder, engine_folder) as engines:
        yield engines


@pytest.fixture(scope="session")
def running_plane(engines: list[Engine], engine_folder: Path) -> Iterator[ControlPlane]:
    """The control plane before the two engines."""
    with ControlPlane(engines, engine_folder).running() as plane:
        yield plane


@pytest.fixture
def plane(running_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane, in step with its engines."""
    with running_plane.in_step() as plane:
        yield plane


@pytest.fixture
def client(plane: ControlPlane) -> Iterator[openai.OpenAI]:
    """The official client, pointed at the gateway."""
    with plane.client() as client:
        yield client
