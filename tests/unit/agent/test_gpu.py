"""GPU samples from a stand-in for NVML, and from a node without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pointsman_agent.io.gpu import GpuSampler


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 reports all values; device 1 (for example a MIG parent) has no utilisation."""

    def utilisation(handle: int) -> Any:
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=75)

    stand_ins = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
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


@pytest.mark.usefixtures("two_gpus")
def test_hardware_is_the_model_and_number_of_an_engines_devices() -> None:
    sampler = GpuSampler()
    assert sampler.hardware((0, 1), ranks=1) == "2x-nvidia-h100-80gb-hbm3"
    assert sampler.hardware((0, 1), ranks=2) == "1x-nvidia-h100-80gb-hbm3"
    assert sampler.hardware((), ranks=1) == "nvidia-h100-80gb-hbm3", (
        "one of several engines, none of which names its own"
    )
    assert sampler.hardware((0, 1), ranks=3) == "nvidia-h100-80gb-hbm3"
    assert sampler.hardware((7,), ranks=1) == ""


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("second", ["NVIDIA A100", ""])
def test_hardware_of_devices_that_differ_is_not_reported(monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    def name(handle: int) -> str:
        if handle and not second:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return second if handle else "NVIDIA H100"

    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", name)
    sampler = GpuSampler()
    assert sampler.hardware((), ranks=1) == sampler.hardware((0, 1), ranks=1) == ""
    assert sampler.hardware((0,), ranks=1) == "1x-nvidia-h100"


def test_no_nvml_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    sampler = GpuSampler()
    assert (sampler.count, sampler.sample(), sampler.hardware((), ranks=1)) == (0, [], "")
    assert sampler.absent_reason
    sampler.close()
