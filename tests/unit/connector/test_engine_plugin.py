"""The plug-in pushes each step of an engine's scheduler, and an error of its own never reaches the engine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from pointsman_agent.core.step_load import StepLoad
from pointsman_connector import vllm_version
from tests.support.fake_modules import fake_modules

MODULE = "pointsman_connector.engine_plugin"


class Scheduler:
    """What is called and read of vLLM's scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.requests: dict[str, Any] = {}
        self.counts = (1, 2)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.requests.setdefault("a", SimpleNamespace(num_tokens=100, num_computed_tokens=0)).num_computed_tokens += 50
        return SimpleNamespace(
            finished_req_ids=set(),
            preempted_req_ids=None,
            scheduled_new_reqs=[SimpleNamespace(req_id="a")],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            num_scheduled_tokens={"a": 50},
            total_num_scheduled_tokens=50,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        if model_runner_output is None:
            raise ValueError("an error of the engine's own")
        return "outputs"

    def get_request_counts(self) -> tuple[int, int]:
        return self.counts

    def get_kv_cache_usage(self) -> float:
        return 0.5


class AsyncScheduler(Scheduler):
    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.placeholders = True


class Engine:
    """An engine's processes: what they share of vLLM, and the agent's end of the socket."""

    def __init__(self, module: Any, config: Any, agent: zmq.Socket[bytes], logged: list[str]) -> None:
        self.module, self.config, self.agent, self.logged = module, config, agent, logged

    def scheduler(self, kind: type = Scheduler, **parallel: int) -> Any:
        """A new engine core's scheduler, made as vLLM makes it."""
        self.config.kind = kind
        ranks = SimpleNamespace(**{"data_parallel_rank": 0, **parallel})
        return self.config.get_scheduler_cls()(SimpleNamespace(parallel_config=ranks))

    def pushed(self) -> StepLoad:
        assert self.agent.poll(10_000)
        return msgspec.msgpack.decode(self.agent.recv(), type=StepLoad)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    logged: list[str] = []

    def log(message: str, *values: Any) -> None:
        logged.append(message % values)

    class SchedulerConfig:
        kind: type = Scheduler

        def get_scheduler_cls(self) -> type:
            return self.kind

    logger = SimpleNamespace(info=lambda *_: None, warning=log, debug=lambda *_, **__: None)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": f"{vllm_version.TESTED}.0"},
        "vllm.config": {"SchedulerConfig": SchedulerConfig},
        "vllm.logger": {"init_logger": lambda _: logger},
    }
    fake_modules(monkeypatch, contents)
    for kind in (Scheduler, AsyncScheduler):
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    monkeypatch.setenv("POINTSMAN_AGENT_LOADS", f"ipc://{tmp_path}/loads")
    monkeypatch.delenv("POINTSMAN_ENGINE_RUN", raising=False)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    context = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    agent = context.socket(zmq.PULL)
    agent.bind(f"ipc://{tmp_path}/loads")
    yield Engine(module, SchedulerConfig(), agent, logged)
    # An engine's socket is open until its process ends.
    context.destroy(linger=0)
    del sys.modules[MODULE]
    # Not only what this test set: the plug-in itself sets it for its children.
    monkeypatch.delenv("POINTSMAN_ENGINE_RUN", raising=False)


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_each_step_is_pushed(engine: Engine, kind: type) -> None:
    engine.module.register()
    engine.module.register()  # vLLM may call it more than once.
    engine.module.PUSH_INTERVAL_S = engine.module.PREFILL_PUSH_INTERVAL_S = 0.0
    scheduler = engine.scheduler(kind, data_parallel_index=3)
    output = scheduler.schedule()
    begun = engine.pushed()
    assert (begun.rank, begun.running, begun.waiting, begun.kv_usage) == (3, 1, 2, 0.5)
    assert (begun.prefill_tokens_left, begun.totals.steps) == (50, 0)
    scheduler.counts = (2, 0)
    assert scheduler.update_from_output(output, "model's output") == "outputs"
    ended = engine.pushed()
    assert (ended.running, ended.waiting, ended.totals.steps, ended.totals.prefill_tokens) == (2, 0, 1, 50)
    assert ended.run == begun.run != ""
    assert engine.logged == []


def test_fast_steps_are_pushed_at_times_and_the_last_one_always(engine: Engine) -> None:
    engine.module.PUSH_INTERVAL_S = engine.module.PREFILL_PUSH_INTERVAL_S = 3_600.0
    engine.module.register()
    scheduler = engine.scheduler()
    output = scheduler.schedule()
    assert engine.pushed().totals.steps == 0, "its prefill begins"
    scheduler.counts = (3, 0)
    scheduler.update_from_output(output, "model's output")
    scheduler.requests["a"].num_computed_tokens = 100  # The next step only decodes.
    output = scheduler.schedule()
    scheduler.counts = (0, 0)
    scheduler.update_from_output(output, "model's output")
    last = engine.pushed()
    assert (last.running, last.totals.steps) == (0, 2)


def test_processes_of_one_engine_have_one_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.module.register()
    run = engine.module.engine_run()
    engine.module.register()
    assert engine.module.engine_run() == run
    monkeypatch.delenv("POINTSMAN_ENGINE_RUN")
    assert engine.module.engine_run() != run, "another engine"


def test_an_error_of_its_own_switches_it_off(engine: Engine) -> None:
    engine.module.register()
    scheduler = engine.scheduler()
    scheduler.get_kv_cache_usage = None
    output = scheduler.schedule()
    assert output.total_num_scheduled_tokens == 50
    assert len(engine.logged) == 1
    for _ in range(3):
        assert scheduler.update_from_output(scheduler.schedule(), "model's output") == "outputs"
    assert len(engine.logged) == 1


def test_an_error_of_the_engine_stays_its_own(engine: Engine) -> None:
    engine.module.register()
    scheduler = engine.scheduler()
    with pytest.raises(ValueError, match="of the engine's own"):
        scheduler.update_from_output(scheduler.schedule(), None)
    assert engine.logged == []


def test_a_scheduler_of_another_shape_is_left_alone(engine: Engine) -> None:
    class Other:
        def __init__(self, vllm_config: Any) -> None:
            self.requests: dict[str, Any] = {}

    engine.module.register()
    assert vars(engine.scheduler(Other)) == {"requests": {}}
    assert len(engine.logged) == 1
    assert (
        "without step loads: AttributeError: Other has no schedule, update_from_output, get_request_counts, "
        "get_kv_cache_usage"
    ) in engine.logged[0]


def test_a_vllm_that_chooses_its_scheduler_in_another_way_is_reported_in_one_line(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(engine.config), "get_scheduler_cls")
    engine.module.register()
    monkeypatch.delattr(sys.modules["vllm.config"], "SchedulerConfig")
    engine.module.register()
    assert [line.split(":")[1] for line in engine.logged] == [" AttributeError", " ImportError"]
    assert not any("\n" in line for line in engine.logged)


def test_an_address_that_is_none_is_reported_in_one_line(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_AGENT_LOADS", "not an address")
    engine.module.register()
    assert "schedule" not in vars(engine.scheduler())
    assert len(engine.logged) == 1
    assert "without step loads: ZMQError" in engine.logged[0]


def test_nothing_changes_without_an_address(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POINTSMAN_AGENT_LOADS")
    engine.module.register()
    assert "schedule" not in vars(engine.scheduler())


def test_an_agent_that_does_not_listen_costs_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_AGENT_LOADS", "ipc:///nowhere/loads")
    engine.module.register()
    scheduler = engine.scheduler()
    for _ in range(1_000):
        scheduler.update_from_output(scheduler.schedule(), "model's output")
    assert engine.logged == []
