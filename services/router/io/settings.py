"""Settings of the router."""

from __future__ import annotations

import json
import secrets
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman.common.io.settings import OtlpEndpoint
from pointsman.router.core.router_state import StateSettings

# The defaults of what the state is told stand there, once.
_STATE = StateSettings()


def _router_id() -> str:
    return f"{socket.gethostname()}-{secrets.token_hex(3)}"


class RouterSettings(BaseSettings):
    """Environment POINTSMAN_ROUTER_*, or flags of `pointsman router`. Times in s."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_ROUTER_")

    listen: str = Field("127.0.0.1:50051", description="HOST:PORT of the gRPC services")
    advertise: str = Field("", description="HOST:PORT that gateways reach this very router at; empty: as `listen` says")
    metrics_listen: str = Field("127.0.0.1:9100", description="HOST:PORT of /metrics and /health; empty for none")
    console_listen: str = Field("", description="HOST:PORT of the console, a page for people; empty for none")
    console_advertise: str = Field(
        "", description="URL at which people reach this very router's console; empty: as `console_listen` says"
    )
    console_max_viewers: int = Field(16, ge=1, description="maximum viewers of the console's decision stream")
    agents_file: Path | None = Field(
        None,
        description="file with lines TOKEN PATTERN... [cert=NAME...]: tokens of agents that may report only instances whose ids, "
        "and the addresses that they are called at, match a pattern (vllm-0.*), and only with a certificate of such a name where "
        "one is given; besides the token of all agents, if there is one; read again when it changes",
    )
    gateways_file: Path | None = Field(
        None,
        description="the same for gateways: tokens that open sessions only under ids that match a pattern (gw-a-*), "
        "and cert=NAME; besides the token of all gateways, if there is one; read again when it changes",
    )
    reflection: bool = Field(
        True, description="let anybody who reaches the gRPC port list its services (gRPC reflection)"
    )
    insecure: bool = Field(False, description="allow listening off the loopback interface without tokens")
    redis_url: SecretStr = Field(
        SecretStr(""), description="redis://... shared by replicas; empty keeps state in memory"
    )
    fleet: str = Field("default", description="name of the fleet in Redis; routers of one fleet share it")
    owner_lease_s: float = Field(1.0, gt=0.1, le=60, description="a dead owner of a pool is replaced after this long")
    router_id: str = Field(default_factory=_router_id, description="unique for the process's life")
    policy: str = Field("unified", description="policy at start")
    policy_settings: dict[str, float | bool | str] = Field(
        default_factory=dict, description="JSON object of the policy's settings"
    )
    affinity_ttl_s: float = Field(
        _STATE.affinity_ttl_s, gt=0, description="a session keeps its owner this long after its last use"
    )
    gateway_lease_s: float = Field(
        _STATE.gateway_lease_s, gt=0, description="reservations outlive their gateway's stream this long"
    )
    max_requests_per_instance: int = Field(
        _STATE.limits.max_requests, ge=0, description="maximum open requests per instance; 0: unlimited"
    )
    max_kv_usage: float = Field(
        _STATE.limits.max_kv_usage,
        ge=0,
        le=1,
        description="KV usage from which an instance with waiting requests gets no more; 0: unlimited",
    )
    queue_size: int = Field(
        _STATE.queue.size, ge=0, description="requests held for each model while no instance may take them; 0: none"
    )
    queue_timeout_s: float = Field(
        _STATE.queue.timeout_s, gt=0, description="a held request is answered after this long at the latest"
    )
    queue_tenant_share: float = Field(
        _STATE.queue.tenant_share, gt=0, le=1, description="share of a model's queue that one tenant may fill"
    )
    queue_ageing_tokens_per_s: float = Field(
        _STATE.queue.ageing_tokens_per_s,
        ge=0,
        description="held requests go by new tokens less this for each second of waiting",
    )
    queue_fair: bool = Field(
        _STATE.queue.fair,
        description="tenants with held requests of one class are served by weight and cost; else their requests wait as one's",
    )
    queue_lower_class_share: float = Field(
        _STATE.queue.lower_class_share,
        ge=0,
        le=1,
        description="what a lower priority class that waits is served at least, as a share of the work of higher ones; 0: "
        "nothing until no higher one waits",
    )
    hold_expiry: Literal["place", "refuse"] = Field(
        _STATE.queue.expiry,
        description="a request that the policy held to the end: place by the default policy, or refuse",
    )
    circuit_failures: int = Field(
        _STATE.circuit.failures,
        ge=0,
        description="failed requests in a row that open an instance's circuit; 0: never",
    )
    circuit_first_open_s: float = Field(
        _STATE.circuit.first_open_s,
        gt=0,
        description="how long a circuit is open before one request is tried; doubled by each failed trial",
    )
    circuit_max_open_s: float = Field(
        _STATE.circuit.max_open_s, gt=0, description="longest time that a circuit is open"
    )
    lost_instance_s: float = Field(
        _STATE.lost_instance_s, gt=0, description="an instance outlives its agent's stream this long"
    )
    migration_window_s: float = Field(
        _STATE.migration_window_s,
        ge=0,
        description="how long an offloaded request counts as recent migration of its target",
    )
    stale_report_s: float = Field(
        _STATE.stale_report_s, gt=0, description="an engine's own figures are not used when older than this"
    )
    stale_keys_s: float = Field(
        _STATE.stale_keys_s,
        gt=0,
        description="an instance's cache counts as empty when its agent was silent for this long; more than agents' intervals",
    )
    max_keys: int = Field(
        _STATE.max_keys, ge=1, description="block keys in the index; instances beyond are approximated"
    )
    startup_wait_s: float = Field(
        3.0, ge=0, description="after a start, wait at most this long for the instances to report before placing"
    )
    decision_log_size: int = Field(
        10_000, ge=1, description="decisions kept in memory; fewer, when they would hold more than 140 MB together"
    )
    decision_log_file: Path | None = Field(
        None, description="append every decision to this file, one JSON object a line"
    )
    decision_log_max_mb: int = Field(
        256,
        ge=0,
        description="rotate decision_log_file before it is larger than this; FILE.1 to FILE.4 stay; 0: leave that to others",
    )
    otlp_endpoint: OtlpEndpoint = Field(
        "", description="http(s)://HOST:PORT of an OTLP/gRPC collector that spans go to; empty: none are made"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")

    @field_validator("policy_settings", mode="before")
    @classmethod
    def _from_flag(cls, value: object) -> object:
        # The environment's JSON comes decoded, a flag's as text.
        return json.loads(value) if isinstance(value, str) else value

    @property
    def ownerless_timeout_s(self) -> float:
        """How long a pool may be without an owner that places, in s: a dead owner's lease, another replica's wait for the
        preferred one, a lease more where Redis has lost its data too, then this router's start-up wait; and a second of slack."""
        takeover_s = 3 * self.owner_lease_s if self.redis_url.get_secret_value() else 0.0
        return takeover_s + self.startup_wait_s + 1.0

    @property
    def settle_s(self) -> float:
        """How long another replica lives before a pool is handed over to it, in s: a start-up wait like this one's, and some
        leases."""
        return self.startup_wait_s + 3 * self.owner_lease_s
