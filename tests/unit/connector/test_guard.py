"""An engine whose vLLM has moved says so at its start, instead of sending wrong KV."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"


def taking(parameters: Sequence[str]) -> Any:
    """A method with those parameters after `self`."""

    def method(self: object) -> None: ...

    kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *parameters)]
    method.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    return method


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What stands in for vLLM's module."""
    parts = PACKAGE.split(".")
    modules = {".".join(parts[:end]): ModuleType(parts[end - 1]) for end in range(1, len(parts) + 1)}
    modules["vllm"].__version__ = "0.99"  # type: ignore[attr-defined]
    connector = modules[f"{PACKAGE}.mooncake_connector"] = ModuleType("mooncake_connector")
    modules[PACKAGE].mooncake_connector = connector  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "pointsman_connector.layerwise.guard", raising=False)
    return connector


@pytest.fixture
def guard(upstream: ModuleType) -> Any:
    """The guard, with a module before it that has all that it wants."""
    guard = importlib.import_module("pointsman_connector.layerwise.guard")
    for name, methods in guard._SHAPES.items():
        setattr(upstream, name, type(name, (), {method: taking(wanted) for method, wanted in methods.items()}))
    return guard


def test_what_it_was_written_for_passes(guard: Any) -> None:
    guard.check()


def test_all_that_moved_is_named_with_what_to_do(guard: Any, upstream: Any) -> None:
    del upstream.SendBlockMeta
    del upstream.MooncakeConnectorWorker._send_blocks
    upstream.MooncakeConnectorScheduler.request_finished = taking(["request", "block_ids", "why"])
    upstream.MooncakeConnectorWorker.get_transfer_results = taking(["since"])
    with pytest.raises(guard.VllmMoved) as raised:
        guard.check()
    assert sorted(raised.value.differences) == [
        "MooncakeConnectorScheduler.request_finished takes request, block_ids, why",
        "MooncakeConnectorWorker.get_transfer_results takes since",
        "no MooncakeConnectorWorker._send_blocks",
        "no SendBlockMeta",
    ]
    assert "written for vLLM 0.32, this is 0.99" in str(raised.value)
    assert '"layerwise": false' in str(raised.value)
