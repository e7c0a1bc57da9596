"""The shadow's settings: flags and POINTSMAN_SHADOW_* variables from the same fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman.common.io.settings import ARGUMENT, Entries, HostPort, Pairs, by_name


class ModelSettings(BaseSettings):
    """What is known of the engines beside which the shadow stands, and what would place for them."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_SHADOW_")

    tokenizers: Pairs = Field(
        default_factory=list,
        description="MODEL=PATH or MODEL=HUB_ID: whose requests are understood, and by which tokens",
    )
    aliases: Pairs = Field(default_factory=list, description="NAME=MODEL: requests for NAME are MODEL's")
    instances: Entries = Field(
        default_factory=list,
        description="HOST:PORT of every engine, as the log names upstreams; default: those that the router or the log names",
    )
    policy: str = Field("unified", description="the policy that would place")
    policy_settings: str = Field("{}", description="JSON object of the policy's settings that differ from its defaults")
    assumed: str = Field("round_robin", description="policy that stands in where nobody says where a request went")
    kv_capacity_tokens: int = Field(
        0, ge=0, description="tokens that an engine's KV cache holds; 0: what the router knows, else 320,000"
    )
    max_model_len: int = Field(0, ge=0, description="prompt and answer together, in tokens; 0: what the cache holds")
    max_num_batched_tokens: int = Field(8_192, ge=1, description="tokens per engine step")
    profile: Path | None = Field(
        None, description="what the engines' steps cost: a file of `pointsman profile`, or reference or slow"
    )
    output_tokens: int = Field(
        200, ge=1, description="tokens of an answer whose length nobody says, unless its request allows fewer"
    )
    prompts_include_answers: bool = Field(True, description="a session's next prompt begins with the answer before it")
    record: Path | None = Field(
        None,
        description="append every request as it was: a trace of hashes, without texts, for read, simulate, compare",
    )
    decisions: Path | None = Field(None, description="append would-be decisions, for `pointsman decisions verify`")
    compared: Path | None = Field(
        None, description="append a line of JSON for each request: where to, and what was cached"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level to log")

    @field_validator("policy_settings")
    @classmethod
    def _object(cls, value: str) -> str:
        if not isinstance(json.loads(value), dict):
            raise ValueError("a JSON object is needed")
        return value

    def policy_map(self) -> dict[str, Any]:
        """Settings of the policy that would place."""
        settings: dict[str, Any] = json.loads(self.policy_settings)
        return settings

    def alias_map(self) -> dict[str, str]:
        """Name asked for -> model."""
        return by_name(self.aliases)

    def tokenizer_map(self) -> dict[str, str]:
        """Model -> path or hub id."""
        return by_name(self.tokenizers)


class ReadSettings(ModelSettings):
    """One reading of a log."""

    log: Path = Field(
        description="access log of the router, or what --record wrote (jsonl, jsonl.gz)", json_schema_extra=ARGUMENT
    )
    window_s: float = Field(
        600.0, gt=0, description="no request takes longer: lines come as requests end, not as they arrive"
    )
    out: Path | None = Field(None, description="file for all figures as JSON")


class ServeSettings(ModelSettings):
    """One shadow beside a router that serves."""

    listen: HostPort = Field(
        "127.0.0.1:8090", description="HOST:PORT for mirrored requests, and for /metrics and /report"
    )
    access_log: Path | None = Field(
        None, description="the router's access log, followed: where requests went and how they ended; by X-Request-ID"
    )
    window_s: float = Field(600.0, gt=0, description="how long a request's line in the access log is waited for")
    router: str = Field(
        "", description="HOST:PORT of a Pointsman router that places nothing, whose agents watch the engines"
    )
    max_body_bytes: int = Field(32 << 20, gt=0, description="largest request body in bytes")
    report_interval_s: float = Field(60.0, ge=0, description="how often the figures are printed; 0: at the end only")
