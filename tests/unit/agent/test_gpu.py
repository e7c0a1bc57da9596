"""GPU samples from a stand-in for NVML, and from a node without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pointsman.agent.io.gpu import GpuSampler


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 tells everything; device 1 (a MIG parent, say) has no utilisation."""

    def utilisation(handle: int) -> Any:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=75)

    stand_ins = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=10 + handle, total=100),
        "nvmlDeviceGetUtilizationRates": utilisation,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(pynvml, name, stand_in)


@pytest.mark.usefixtures("two_gpus")
def test_what_a_device_does_not_tell_is_absent() -> None:
    sampler = GpuSampler()
    first, second = sampler.sample()
    assert (first.index, first.utilisation, first.memory_used, first.memory_total) == (0, 0.75, 10, 100)
    assert (second.index, second.utilisation, second.memory_used) == (1, 0, 11)
    assert [gpu.index for gpu in sampler.sample((1,))] == [1]
    sampler.close()
    assert sampler.count == 0


def test_no_nvml_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    sampler = GpuSampler()
    assert (sampler.count, sampler.sample()) == (0, [])
    assert sampler.absent_reason
    sampler.close()
