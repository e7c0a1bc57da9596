"""GPU utilisation and memory by NVML. A node without NVIDIA GPUs has no samples; that is no error."""

from __future__ import annotations

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

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self._handles)

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
