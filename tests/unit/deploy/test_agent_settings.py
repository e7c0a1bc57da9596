"""The settings of agents' programs in deploy/agents name one gateway and one model, each in its program's form."""

from __future__ import annotations

import json
import tomllib

import yaml

from tests.support.repository import REPOSITORY

AGENTS = REPOSITORY / "deploy/agents"
GATEWAY, MODEL, CONTEXT = "http://127.0.0.1:8080", "qwen3-coder", 131_072


def test_claude_codes_variables() -> None:
    lines = [line for line in (AGENTS / "claude.env").read_text().splitlines() if not line.startswith("#")]
    variables = dict(line.split("=", 1) for line in lines)
    assert variables["ANTHROPIC_BASE_URL"] == GATEWAY, "Claude Code adds /v1"
    assert {value for name, value in variables.items() if name.endswith("_MODEL")} == {MODEL}
    assert int(variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]) == CONTEXT


def test_codexs_settings() -> None:
    settings = tomllib.loads((AGENTS / "codex.toml").read_text())
    provider = settings["model_providers"][settings["model_provider"]]
    assert (settings["model"], provider["base_url"], provider["wire_api"]) == (MODEL, f"{GATEWAY}/v1", "responses")
    assert settings["model_context_window"] == CONTEXT, "Codex compacts only by this"


def test_opencodes_settings() -> None:
    settings = json.loads((AGENTS / "opencode.json").read_text())
    assert settings["provider"]["pointsman"]["options"]["baseURL"] == f"{GATEWAY}/v1"
    assert {settings["model"], settings["small_model"]} == {f"pointsman/{MODEL}"}
    assert settings["provider"]["pointsman"]["models"][MODEL]["limit"]["context"] == CONTEXT


def test_continues_settings() -> None:
    (model,) = yaml.safe_load((AGENTS / "continue.yaml").read_text())["models"]
    assert (model["model"], model["apiBase"]) == (MODEL, f"{GATEWAY}/v1")
    assert model["defaultCompletionOptions"]["contextLength"] == CONTEXT
