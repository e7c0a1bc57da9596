"""The agent's settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pointsman_agent.io.settings import AgentSettings


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_AGENT_ENGINES", "http://a:1 http://b:2")
    monkeypatch.setenv("POINTSMAN_AGENT_ROUTERS", "r:50051")
    settings = AgentSettings()
    assert settings.engines == ["http://a:1", "http://b:2"]
    assert settings.routers == ["r:50051"]


@pytest.mark.parametrize(
    ("engines", "routers", "field"),
    [
        (["a:1"], ["r:1"], "engines"),
        (["http://a:1", "http://a:1/"], ["r:1"], "engines"),
        (["http://a:1"], [], "routers"),
        (["http://a:1"], ["r"], "routers"),
    ],
)
def test_settings_that_cannot_work_name_the_field(engines: list[str], routers: list[str], field: str) -> None:
    with pytest.raises(ValidationError) as error:
        AgentSettings(engines=engines, routers=routers)
    assert error.value.errors()[0]["loc"] == (field,)


def test_an_agent_needs_an_engine_or_a_service_of_engines() -> None:
    with pytest.raises(ValidationError, match="engines or engine_services must be given"):
        AgentSettings(engines=[], routers=["r:1"])
    assert AgentSettings(engine_services=["llm/vllm:http"], routers=["r:1"]).engines == []
    with pytest.raises(ValidationError) as error:
        AgentSettings(engine_services=["vllm"], routers=["r:1"])
    assert error.value.errors()[0]["loc"] == ("engine_services",)
