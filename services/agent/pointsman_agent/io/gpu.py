"""GPU models, utilisation and memory from NVML. A node without NVIDIA GPUs has no samples, without an error."""

from __future__ import annotations

from collections.abc import Sequence

import pynvml

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.engine_metrics import hardware_word


class GpuSampler:
    """Samples the node's devices. Each call blocks for about a millisecond, so call it in a thread."""

    def __init__(self) -> None:
        self.absent_reason = ""
        """Why there are no devices, or the last error of one; empty otherwise."""
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
        """Return one word for the devices of each of an engine's `ranks` data-parallel ranks: "2x-nvidia-h200".

        `indices` are the engine's devices. If they are empty or do not divide evenly among the ranks, the word has no number:
        "nvidia-h200". Empty if a device's model is unknown or the models differ; without indices all devices of the node count.
        """
        models = {self._models[index] for index in indices or range(self.count) if index < self.count}
        if len(models) != 1 or "" in models:
            return ""
        each, rest = divmod(len(indices), ranks)
        return f"{each}x-{models.pop()}" if each and not rest else models.pop()

    def sample(self, indices: Sequence[int] | None = None) -> list[pb.Gpu]:
        """Return one sample for each device, or for each in `indices`. A value that a device does not report stays 0 (MIG has no
        utilisation)."""
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
    """Return the device's model as one word; "" if NVML does not report it."""
    try:
        name = pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:
        return ""
    return hardware_word(name)
