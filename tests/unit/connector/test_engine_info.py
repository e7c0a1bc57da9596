"""What an engine says on /metrics of its limits and devices, from its configuration alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from pointsman_agent.core.engine_metrics import parse_metrics
from tests.support.fake_modules import fake_modules

MODULE = "pointsman_connector.engine_info"


class Platform:
    name = "NVIDIA H200"

    def is_cpu(self) -> bool:
        return False

    is_rocm = is_cpu

    def get_device_name(self) -> str:
        return self.name


class NvmlCudaPlatform(Platform): ...


class NonNvmlCudaPlatform(Platform):
    def get_device_name(self) -> str:
        raise AssertionError("it would initialise the device")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with stand-ins for what is not installed here."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": NvmlCudaPlatform()},
    }
    fake_modules(monkeypatch, contents)
    monkeypatch.setenv("POINTSMAN_ENGINE_RUN", "7f")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    yield module
    REGISTRY.unregister(module._INFO)
    del sys.modules[MODULE]


def config(*, tp: int = 2, pp: int = 1, threshold: int = 4_096, budget: int = 8_192, cache_dtype: str = "auto") -> Any:
    """What is read of a VllmConfig."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp, data_parallel_size=4),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=budget, max_num_seqs=256, long_prefill_token_threshold=threshold
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(
            use_mla=False,
            is_hybrid=False,
            is_attention_free=False,
            dtype=SimpleNamespace(itemsize=2),
            get_num_kv_heads=lambda parallel: 8 // parallel.tensor_parallel_size,
            get_num_layers=lambda parallel: 48 // parallel.pipeline_parallel_size,
            get_head_size=lambda: 128,
        ),
    )


def test_the_agent_reads_what_the_engine_says(module: Any) -> None:
    module.announce_engine(config())
    scrape = parse_metrics(generate_latest())
    assert scrape.engine == {
        "run": "7f",
        "device": "NVIDIA H200",
        "kv_token_bytes": str(2 * 4 * 128 * 48 * 2),
        "tensor_parallel_size": "2",
        "pipeline_parallel_size": "1",
        "data_parallel_size": "4",
        "max_num_batched_tokens": "8192",
        "max_num_seqs": "256",
        "long_prefill_token_threshold": "4096",
    }
    assert (scrape.run, scrape.hardware, scrape.long_prefill_token_threshold) == ("7f", "2x-nvidia-h200", 4_096)
    module.announce_engine(config(pp=2))
    assert parse_metrics(generate_latest()).hardware == "4x-nvidia-h200-pp2"


@pytest.mark.parametrize(("cache_dtype", "size"), [("auto", 98_304), ("fp8_e4m3", 49_152), ("int4_per_token_head", 0)])
def test_the_agent_reads_the_size_of_a_tokens_kv_on_each_device(module: Any, cache_dtype: str, size: int) -> None:
    module.announce_engine(config(cache_dtype=cache_dtype))
    assert parse_metrics(generate_latest()).kv_token_bytes == size


def test_a_threshold_that_cuts_no_prompt_is_none(module: Any) -> None:
    module.announce_engine(config(threshold=4_096, budget=2_048))
    assert parse_metrics(generate_latest()).long_prefill_token_threshold == 0


def test_a_device_is_not_initialised_for_its_name(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", NonNvmlCudaPlatform())
    module.announce_engine(config())
    assert parse_metrics(generate_latest()).hardware == ""


def test_what_another_vllm_lacks_is_empty(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "vllm.platforms")
    other = config()
    del other.scheduler_config.long_prefill_token_threshold
    module.announce_engine(other)
    scrape = parse_metrics(generate_latest())
    assert (scrape.run, scrape.hardware, scrape.long_prefill_token_threshold) == ("7f", "", 0)
    assert "without the announcement of its device" in caplog.text
