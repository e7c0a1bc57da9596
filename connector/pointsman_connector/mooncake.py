"""vLLM's MooncakeConnector for engines with and without an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector


class AnyDeviceMooncakeConnector(MooncakeConnector):
    """MooncakeConnector as it is, where there is an accelerator; on a CPU engine its constructor gets past the question
    which accelerator is the current one, the only thing of it that does not run there (vLLM 0.32)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with some_device():
            super().__init__(*args, **kwargs)


@contextmanager
def some_device() -> Iterator[None]:
    """Inside the block the current accelerator's index is 0 where there is none, instead of an error."""
    if torch.accelerator.is_available():
        yield
        return
    asked = torch.accelerator.current_device_index
    torch.accelerator.current_device_index = lambda: 0
    try:
        yield
    finally:
        torch.accelerator.current_device_index = asked
