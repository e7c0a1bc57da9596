"""GPU models, utilisation and memory by NVML. A node without NVIDIA GPUs has no samples; that is no error."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pynvml

from pointsman.agent.v1 import agent_pb2 as pb


class GpuSampler:
    """Reads the node's devices. Calls block for a millisecond or so each: keep them off the event loop."""

    def __init__(self) -> None:
        self.absent_reason = ""
        """Why there are no devices; empty when there are."""
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self._handles = []
            self.absent_reason = str(error)
        self._models = [_model(handle) for handle in self._handles]

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self._handles)

    def hardware(self, indices: Sequence[int], ranks: int) -> str:
        """One word for what each of an engine's `ranks` data-parallel ranks computes on: "2x-nvidia-h200". `indices` are the
        engine's devices; of an engine that named none of several on its node the number is unknown: "nvidia-h200". Empty where
        the node's devices do not tell, or are not alike."""
        models = {self._models[index] for index in indices or range(self.count) if index < self.count}
        if len(models) != 1 or "" in models:
            return ""
        each, rest = divmod(len(indices), ranks)
        return f"{each}x-{models.pop()}" if each and not rest else models.pop()

    def sample(self, indices: Sequence[int] | None = None) -> list[pb.Gpu]:
        """One sample per device, of all or of those named. What a device does not tell stays 0 (MIG has no utilisation)."""
        samples = []
        for index, handle in enumerate(self._handles):
            if indices is not None and index not in indices:
                continue
            gpu = pb.Gpu(index=index)
            try:
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                gpu.memory_used, gpu.memory_total = memory.used, memory.total
                gpu.utilisation = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            except pynvml.NVMLError as error:
                self.absent_reason = f"GPU {index}: {error}"
            samples.append(gpu)
        return samples

    def close(self) -> None:
        """Release NVML."""
        if self._handles:
            pynvml.nvmlShutdown()
            self._handles = []


def _model(handle: object) -> str:
    """The device's model as one word; empty when it does not tell."""
    try:
        name = pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return ""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
