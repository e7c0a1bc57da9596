"""vLLM's MooncakeConnector for engines with or without an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector


class AnyDeviceMooncakeConnector(MooncakeConnector):
    """MooncakeConnector that also starts on a CPU engine.

    It is unchanged if there is an accelerator. On a CPU engine only one call of its constructor fails (vLLM 0.32), the query of
    the current accelerator; this class replaces its result.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with some_device():
            super().__init__(*args, **kwargs)


@contextmanager
def some_device() -> Iterator[None]:
    """Context manager in which the current accelerator's index is 0 if there is no accelerator, instead of an error."""
    if torch.accelerator.is_available():
        yield
        return
    asked = torch.accelerator.current_device_index
    torch.accelerator.current_device_index = lambda: 0
    try:
        yield
    finally:
        torch.accelerator.current_device_index = asked
