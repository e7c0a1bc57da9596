"""As a child of vLLM's MultiConnector the connector pushes layers, too, and its statistics end no request and no log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.vllm_questions import Vllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]


def test_a_prompt_is_pushed_and_counted(vllm: Vllm, model_folder: Path) -> None:
    """tests/engine/test_async_scheduling.py has the scheduler's side."""
    ask = "import multi_offload; answer = multi_offload.pushed(**asked)"
    result = vllm.ask(ask, {"model_folder": str(model_folder)})
    assert (result["sent"], result["received"], result["invalid"]) == (["p-t"], ["d-t"], [])
    assert result["same"]
    assert result["pushes"] > 0
    assert (result["fallbacks"], result["checked"]) == (0, 1)
    assert "Num pushes" in result["logged"]


def test_an_engine_without_layerwise_push_logs_its_transfers(vllm: Vllm) -> None:
    """Its workers have vLLM's own statistics; an error would end vLLM's periodic log."""
    ask = "import multi_offload; answer = multi_offload.logged_without_pushes(**asked)"
    logged = vllm.ask(ask, {})
    assert "Num successful transfers=1" in logged
    assert "Num pushes=0" in logged
