"""What a gateway says of the models that it is told of, and of those that it is given."""

from __future__ import annotations

from unittest import mock

import pytest
import structlog.testing

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.io.routing import model_pools
from pointsman_gateway.io.routing.model_pools import ModelPools
from pointsman_gateway.io.tokenizer_files import HubRules, TokenizerNotFound


async def test_a_tokenizer_of_a_model_that_nobody_serves_is_told_once() -> None:
    """As that of Qwen/Qwen3-32B where its name has lost a slash."""
    tokenizers = {"Qwen3-32B": "/models/qwen", "m": "/models/m"}
    pools = ModelPools(mock.Mock(), mock.Mock(), tokenizers, mock.Mock(), mock.Mock())
    with structlog.testing.capture_logs() as logs:
        pools.update([])
        assert logs == []
        for _ in range(2):
            pools.update([placement_pb2.Pool(model=name) for name in ("Qwen/Qwen3-32B", "m")])
            pools.update([placement_pb2.Pool(model="m")])
    await pools.close()
    told = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [(entry["given"], entry["served"]) for entry in told] == [(["Qwen3-32B"], ["Qwen/Qwen3-32B", "m"])]


async def test_a_panic_of_the_tokenizer_library_is_a_tokenizer_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A panic is no Exception. The check would wait in vain, now and at each later try."""

    class PanicException(BaseException):
        pass

    monkeypatch.setattr(model_pools, "find_tokenizer", mock.Mock(side_effect=PanicException))
    monkeypatch.setattr(model_pools, "LOAD_S", 2.0)
    pools = ModelPools(mock.Mock(), mock.Mock(), {}, mock.Mock(), HubRules())
    with pytest.raises(TokenizerNotFound, match="cannot be read: PanicException"):
        await pools.load("/models/m")
    await pools.close()
