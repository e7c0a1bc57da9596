"""vLLM's answer to an engine that receives KV, with checksums beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeXferResponse

from pointsman_connector.layerwise.kv_checks import Sums


class CheckedXferResponse(MooncakeXferResponse, omit_defaults=True):  # type: ignore[call-arg]
    """`sums`: by receiving request. vLLM's own receiver ignores the field, and its own sender leaves it out."""

    sums: dict[str, Sums] = msgspec.field(default_factory=dict)


class AnswerEncoder:
    """vLLM's encoder of a worker's messages, which adds to each answer the checksums that `sums` returns, by request."""

    def __init__(self, encoder: msgspec.msgpack.Encoder, sums: Callable[[], Mapping[str, Sums]]) -> None:
        self._encoder = encoder
        self._sums = sums

    def encode(self, message: Any) -> bytes:
        """As vLLM's."""
        if isinstance(message, MooncakeXferResponse):
            message = with_sums(message, self._sums())
        return self._encoder.encode(message)


def with_sums(response: MooncakeXferResponse, sums: Mapping[str, Sums]) -> MooncakeXferResponse:
    """`response`, with the checksums of those of its requests that were sent well and have any."""
    sent_sums = {request: sums[request] for request in response.ok_reqs or () if sums.get(request)}
    if not sent_sums:
        return response
    return CheckedXferResponse(
        status=response.status,
        ok_reqs=response.ok_reqs,
        err_reqs=response.err_reqs,
        err_msg=response.err_msg,
        sums=sent_sums,
    )
