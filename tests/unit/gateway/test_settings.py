"""The gateway's settings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pointsman_gateway.io.settings import GatewaySettings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_GATEWAY_ROUTERS", "a:1 b:2")
    monkeypatch.setenv("POINTSMAN_GATEWAY_TOKENIZERS", "m=/models/m org/n=org/n")
    monkeypatch.setenv("POINTSMAN_GATEWAY_ALIASES", "big=org/n")
    read = GatewaySettings()
    assert read.routers == ["a:1", "b:2"]
    assert read.alias_map() == {"big": "org/n"}
    assert read.tokenizer_paths() == {"m": "/models/m", "org/n": "org/n"}
    assert GatewaySettings(routers=["a:1 b:2", "c:3"]).routers == ["a:1", "b:2", "c:3"]
    assert read.gateway_id != GatewaySettings().gateway_id


@pytest.mark.parametrize(
    "wrong",
    [
        {"listen": "8080"},
        {"listen": "h:99999"},
        {"routers": []},
        {"routers": ["x"]},
        {"tokenizers": ["m"]},
        {"aliases": ["m="]},
        {"aliases": ["a=m,b=m"]},
        {"max_body_bytes": 0},
        {"max_buffered_body_bytes": 1000},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(**wrong)
