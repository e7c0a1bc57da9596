"""An engine whose vLLM has moved says so at its start, instead of sending wrong KV."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
MODULES = (f"{CONNECTORS}.base", f"{CONNECTORS}.mooncake.mooncake_connector", "vllm.v1.core.sched.output")


def taking(parameters: Sequence[str]) -> Any:
    """A method with those parameters after `self`."""

    def method(self: object) -> None: ...

    kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *parameters)]
    vars(method)["__signature__"] = inspect.Signature(kinds)
    return method


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """What stands in for vLLM's modules."""
    made: dict[str, Any] = {}
    for path in MODULES:
        for end in range(1, path.count(".") + 2):
            name = ".".join(path.split(".")[:end])
            if name not in made:
                made[name] = ModuleType(name)
                monkeypatch.setitem(sys.modules, name, made[name])
                if end > 1:
                    parent, _, child = name.rpartition(".")
                    setattr(made[parent], child, made[name])
    made["vllm"].__version__ = "0.99"
    monkeypatch.delitem(sys.modules, "pointsman_connector.layerwise.vllm_compatibility", raising=False)
    base, upstream, output = (made[path] for path in MODULES)
    return base, upstream, output


def statuses(names: Iterable[str]) -> Any:
    """An enumeration of vLLM's."""
    make: Callable[..., Any] = Enum
    return make("Status", tuple(names))


@pytest.fixture
def guard(vllm: tuple[Any, Any, Any]) -> Any:
    """The guard, before modules that have all that it wants."""
    base, upstream, output = vllm
    guard: Any = importlib.import_module("pointsman_connector.layerwise.vllm_compatibility")
    for module, classes in ((upstream, guard._SHAPES), (base, {"KVConnectorBase_V1": guard._HOOKS})):
        for name, methods in classes.items():
            setattr(module, name, type(name, (), {method: taking(wanted) for method, wanted in methods.items()}))
    for module, messages in ((output, guard._READ), (upstream, guard._MESSAGES)):
        for name, fields in messages.items():
            setattr(module, name, type(name, (), {"__annotations__": dict.fromkeys(fields, "int")}))
    upstream.MooncakeXferResponseStatus = statuses(guard._MESSAGES["MooncakeXferResponseStatus"])
    return guard


def test_what_it_was_written_for_passes(guard: Any) -> None:
    guard.check()


def test_all_that_moved_is_named_with_what_to_do(guard: Any, vllm: tuple[Any, Any, Any]) -> None:
    base, upstream, output = vllm
    del upstream.SendBlockMeta
    del upstream.MooncakeConnectorWorker._send_blocks
    upstream.MooncakeConnectorScheduler.request_finished = taking(["request", "block_ids", "why"])
    upstream.MooncakeConnectorWorker.get_transfer_results = taking(["since"])
    del base.KVConnectorBase_V1.save_kv_layer
    del output.SchedulerOutput.__annotations__["kv_connector_block_state"]
    with pytest.raises(guard.IncompatibleVllm) as raised:
        guard.check()
    assert sorted(raised.value.differences) == [
        "MooncakeConnectorScheduler.request_finished takes request, block_ids, why",
        "MooncakeConnectorWorker.get_transfer_results takes since",
        "no KVConnectorBase_V1.save_kv_layer",
        "no MooncakeConnectorWorker._send_blocks",
        "no SchedulerOutput.kv_connector_block_state",
        "no SendBlockMeta",
    ]
    assert "written for vLLM 0.32, this is 0.99" in str(raised.value)
    assert '"layerwise": false' in str(raised.value)


def test_a_worker_that_keeps_something_else_is_reported_at_once(guard: Any) -> None:
    worker = SimpleNamespace(**dict.fromkeys(guard._KEPT), engine=SimpleNamespace(**dict.fromkeys(guard._ENGINE)))
    guard.check_worker(worker)
    del worker.reqs_need_send
    del worker.engine.get_batch_transfer_status
    with pytest.raises(guard.IncompatibleVllm) as raised:
        guard.check_worker(worker)
    assert raised.value.differences == [
        "no MooncakeConnectorWorker.reqs_need_send",
        "no TransferEngine.get_batch_transfer_status",
    ]


def test_a_module_that_is_gone_is_named_as_what_was_in_it(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.core.sched.output")
    with pytest.raises(guard.IncompatibleVllm) as raised:
        guard.check()
    assert raised.value.differences == [f"no SchedulerOutput.{name}" for name in guard._READ["SchedulerOutput"]]


def test_a_name_that_cannot_be_imported_is_one_line_with_what_to_do(guard: Any) -> None:
    with pytest.raises(guard.IncompatibleVllm) as raised, guard.imports():
        importlib.import_module("vllm.v1.gone")
    assert raised.value.differences == [
        "ModuleNotFoundError: No module named 'vllm.v1.gone'; 'vllm.v1' is not a package"
    ]
    assert "written for vLLM 0.32, this is 0.99" in str(raised.value)
    assert "MooncakeConnector" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_messages_with_more_than_is_known_are_not_compatible(guard: Any, vllm: tuple[Any, Any, Any]) -> None:
    """vLLM 0.33: the methods are the same, but a receiver's layout may be absent from its message."""
    _, upstream, _ = vllm
    upstream.MooncakeXferMetadata.__annotations__["layout_id"] = "int"
    upstream.MooncakeXferResponseStatus = statuses(("FINISH", "CONTINUE", "ERROR", "LAYOUT_MISS"))
    del upstream.PullReqMeta.__annotations__["failed"]
    with pytest.raises(guard.IncompatibleVllm) as raised:
        guard.check()
    assert sorted(raised.value.differences) == [
        "MooncakeXferMetadata has layout_id",
        "MooncakeXferResponseStatus has LAYOUT_MISS",
        "no PullReqMeta.failed",
    ]
