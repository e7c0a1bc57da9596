"""The shadow's settings. The same fields define flags and POINTSMAN_SHADOW_* variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_common.io.settings import ARGUMENT, Entries, HostPort, Pairs, by_name
from pointsman_router.core.policy.registry import DEFAULT_POLICY


class ModelSettings(BaseSettings):
    """Settings of both shadow commands: the engines of the other router, the policy to compare, and the output files."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_SHADOW_")

    tokenizers: Pairs = Field(
        default_factory=list,
        description="MODEL=PATH or MODEL=HUB_ID: the models to compare and their tokenizers",
    )
    aliases: Pairs = Field(default_factory=list, description="NAME=MODEL: NAME is another name of MODEL")
    instances: Entries = Field(
        default_factory=list,
        description="HOST:PORT of every engine, as the log names upstreams; default: all that the router or the log names",
    )
    policy: str = Field(DEFAULT_POLICY, description="Pointsman's policy to compare with")
    policy_settings: str = Field("{}", description="JSON object of the policy's settings that differ from its defaults")
    assumed: str = Field(
        "round_robin", description="policy for requests that the other router placed at an unknown engine"
    )
    kv_capacity_tokens: int = Field(
        0, ge=0, description="capacity of each engine's KV cache, tokens; 0: as the router reports, else 320,000"
    )
    max_model_len: int = Field(
        0,
        ge=0,
        description="maximum tokens of prompt and answer together; 0: as the router reports, else the cache's capacity",
    )
    max_num_batched_tokens: int = Field(8_192, ge=1, description="maximum tokens per engine step")
    profile: Path | None = Field(
        None, description="costs of the engines' steps: a file of `pointsman profile`, or reference or slow"
    )
    output_tokens: int = Field(
        200, ge=1, description="assumed tokens of an answer of unknown length, unless its request allows fewer"
    )
    prompts_include_answers: bool = Field(True, description="a session's next prompt begins with the answer before it")
    record: Path | None = Field(
        None,
        description="file to append each request to, with hashes instead of texts: a trace for read, simulate, compare",
    )
    decisions: Path | None = Field(
        None, description="file to append Pointsman's decisions to, for `pointsman decisions verify`"
    )
    compared: Path | None = Field(
        None, description="file to append a JSON line per request to: both placements and their cached tokens"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="minimum level to log")

    @field_validator("policy_settings")
    @classmethod
    def _object(cls, value: str) -> str:
        if not isinstance(json.loads(value), dict):
            raise ValueError("a JSON object is needed")
        return value

    def policy_map(self) -> dict[str, Any]:
        """Return the settings of `policy`."""
        settings: dict[str, Any] = json.loads(self.policy_settings)
        return settings

    def alias_map(self) -> dict[str, str]:
        """Return the model by alias."""
        return by_name(self.aliases)

    def tokenizer_map(self) -> dict[str, str]:
        """Return the tokenizer's path or hub id by model."""
        return by_name(self.tokenizers)


class ReadSettings(ModelSettings):
    """Settings of `pointsman shadow read`."""

    log: Path = Field(
        description="access log of the router, or a file of --record (jsonl, jsonl.gz)", json_schema_extra=ARGUMENT
    )
    window_s: float = Field(
        600.0, gt=0, description="maximum duration of a request, in seconds (the log is in the order of requests' ends)"
    )
    out: Path | None = Field(None, description="file to write all figures to as JSON")


class ServeSettings(ModelSettings):
    """Settings of `pointsman shadow serve`."""

    listen: HostPort = Field(
        "127.0.0.1:8090", description="HOST:PORT for mirrored requests, and for /metrics and /report"
    )
    access_log: Path | None = Field(
        None, description="the router's access log to follow, for placements and outcomes; matched by X-Request-ID"
    )
    window_s: float = Field(600.0, gt=0, description="maximum wait for a request's line in the access log, in seconds")
    router: str = Field(
        "",
        description="Pointsman router, as for `pointsman instances`, that places nothing, whose agents monitor the engines",
    )
    max_body_bytes: int = Field(32 << 20, gt=0, description="maximum size of a request body, in bytes")
    report_interval_s: float = Field(
        60.0, ge=0, description="interval between two prints of the report, in seconds; 0: only at the end"
    )
