"""The agent's settings, from flags or from environment variables with the prefix POINTSMAN_AGENT_."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_agent.core.engine_address import parse_engine_address
from pointsman_agent.core.engine_service import parse_engine_service
from pointsman_common.io.settings import Entries, OptionalHostPort, Secret, Targets


class AgentSettings(BaseSettings):
    """Settings of one agent."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_AGENT_")

    engines: Entries = Field(
        default_factory=list,
        description="base URL of each engine, with options as a query: events, replay, topic (ZMQ; default: the engine's "
        "answer), advertise (URL for gateways), gpus (indices on this node), kv (mooncake or nixl: the engine's KV connector, if "
        "it does not announce one), kv-role (both, producer or consumer), bootstrap (base URL of Mooncake's bootstrap server; "
        "default: the announced port, or 8998, of the advertised host), hardware (one word for engines of equal speed; default: "
        "the devices that the engine announces, or NVML's name), long-prefill-token-threshold (the engine's setting; default: as "
        "the engine announces), storage (one word for the store of KV blocks that engines with the same word share; default: "
        "none is shared)",
    )
    engine_services: Entries = Field(
        default_factory=list,
        description="Services of Kubernetes whose endpoints are engines, each NAMESPACE/NAME or NAMESPACE/NAME:PORT (a port's "
        "name or number), with options as of an engine; the agent follows their EndpointSlices",
    )
    routers: Targets = Field(default_factory=list, description="HOST:PORT of each router replica")
    state_dir: Path = Field(
        Path(".state/agent"), description="folder for the saved cached blocks of engines; must persist over restarts"
    )
    scrape_interval_s: float = Field(
        1.0, ge=0.05, le=60, description="interval between two scrapes of an engine, in seconds"
    )
    consistency_check_interval_s: float = Field(
        5.0, ge=0.1, le=600, description="interval between two consistency checks, in seconds"
    )
    save_interval_s: float = Field(
        15.0, ge=0.1, le=600, description="minimum interval between two saves of the cached blocks, in seconds"
    )
    metrics_listen: OptionalHostPort = Field(
        "127.0.0.1:9101", description="HOST:PORT of /metrics and /health; empty: none"
    )
    step_loads_listen: str = Field(
        "",
        description="ZMQ address to bind for step loads, which engines with Pointsman's connector package push at their steps "
        "(ipc:///run/pointsman/loads, tcp://127.0.0.1:9108); empty: loads only from /metrics",
    )
    engine_api_key: Secret = Field(SecretStr(""), description="API key for engines that are started with --api-key")
    engine_ca: Path | None = Field(
        None,
        description="certificates (PEM) of the authorities trusted for HTTPS engines; default: the system's",
    )
    ends_with_engines: bool = Field(
        False,
        description="the engines end when the agent is stopped, as in one pod: then routers place nothing more on them, and what "
        "they compute goes on. Otherwise they stay in the fleet while they answer",
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")

    @field_validator("engines")
    @classmethod
    def _engines_parse(cls, value: list[str]) -> list[str]:
        addresses = [parse_engine_address(text).instance_id(None) for text in value]
        if twice := [address for address in addresses if addresses.count(address) > 1]:
            raise ValueError(f"two engines have the address {twice[0]}: give each once, or its own ?advertise=URL")
        return value

    @field_validator("engine_services")
    @classmethod
    def _services_parse(cls, value: list[str]) -> list[str]:
        for text in value:
            parse_engine_service(text)
        return value

    @model_validator(mode="after")
    def _some_engine(self) -> AgentSettings:
        if not self.engines and not self.engine_services:
            raise ValueError("engines or engine_services must be given")
        return self

    @field_validator("routers")
    @classmethod
    def _routers_parse(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("at least one router is needed")
        return value
