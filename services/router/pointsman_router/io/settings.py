"""Settings of the router."""

from __future__ import annotations

import json
import secrets
import socket
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_common.io.settings import HostPort, InvalidSetting, OptionalHostPort, OtlpEndpoint, split_urls
from pointsman_router.core.policy.base import Policy, SettingError
from pointsman_router.core.policy.registry import DEFAULT_POLICY, Policies, make_policy, place_of
from pointsman_router.core.router_state import StateSettings
from pointsman_router.io.store.redis_address import RedisAddress

# The defaults of settings that are passed on to the state: StateSettings defines them.
_STATE = StateSettings()


def _router_id() -> str:
    return f"{socket.gethostname()}-{secrets.token_hex(3)}"


class RouterSettings(BaseSettings):
    """The router's settings, from the environment (POINTSMAN_ROUTER_*) or flags of `pointsman router`. Times are in s."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_ROUTER_")
    # former settings -> the value that counts now, for the message to those who still set one
    REMOVED: ClassVar = {
        "queue_ageing_tokens_per_s": "5,000",
        "queue_lower_class_share": "0.1",
        "admission_interactive_s": "30",
        "admission_batch_s": "600",
        "circuit_first_open_s": "1",
        "circuit_max_open_s": "30",
        "console_max_viewers": "16",
    }

    listen: HostPort = Field("127.0.0.1:50051", description="HOST:PORT of the gRPC services")
    advertise: OptionalHostPort = Field(
        "", description="HOST:PORT at which gateways reach this replica; empty: from `listen`"
    )
    metrics_listen: OptionalHostPort = Field(
        "127.0.0.1:9100", description="HOST:PORT of /metrics, /health and /livez; empty: none"
    )
    console_listen: OptionalHostPort = Field("", description="HOST:PORT of the console, a web page; empty: none")
    console_advertise: str = Field(
        "", description="URL at which browsers reach this replica's console; empty: from `console_listen`"
    )
    agents_file: Path | None = Field(
        None,
        description="file with lines TOKEN PATTERN... [cert=NAME...]: each token permits only instances whose id and address "
        "match a pattern (vllm-0.*), and, if cert= is given, only agents with a certificate of such a name; "
        "valid in addition to the token of all agents; read again when it changes",
    )
    gateways_file: Path | None = Field(
        None,
        description="the same for gateways: each token permits only sessions under ids that match a pattern (gw-a-*), "
        "and cert=NAME; valid in addition to the token of all gateways; read again when it changes",
    )
    reflection: bool = Field(
        True, description="list the services to anyone who reaches the gRPC port (gRPC reflection)"
    )
    insecure: bool = Field(False, description="allow listening off the loopback interface without tokens")
    redis_url: SecretStr = Field(
        SecretStr(""),
        description="redis://... that replicas share, or several, separated by commas, of which one is the master; "
        "empty: state in memory only",
    )
    redis_sentinels: SecretStr = Field(
        SecretStr(""),
        description="redis://... of Sentinels, separated by commas, each with its own user and password; they name the "
        "master's address, and redis_url has its user, password, database and TLS; empty: none",
    )
    redis_master: str = Field("mymaster", description="name of the master at the Sentinels")
    redis_cluster: bool = Field(False, description="redis_url is a node of a Redis Cluster")
    fleet: str = Field("default", description="name of the fleet in Redis, the same for all routers of a fleet")
    owner_lease_s: float = Field(
        1.0, gt=0.1, le=60, description="seconds after which a pool's owner that does not renew its lease is replaced"
    )
    router_id: str = Field(
        default_factory=_router_id, description="id of this process, unique among the fleet's routers"
    )
    policy: str = Field(DEFAULT_POLICY, description="policy at start: NAME or NAME:SETTING=VALUE,...")
    policy_settings: dict[str, float | bool | str] = Field(
        default_factory=dict, description="JSON object of the policy's settings"
    )
    affinity_ttl_s: float = Field(
        _STATE.affinity_ttl_s, gt=0, description="seconds after its last use for which a session keeps its owner"
    )
    gateway_lease_s: float = Field(
        _STATE.gateway_lease_s,
        gt=0,
        description="seconds that reservations are kept after their gateway's stream has ended",
    )
    max_requests_per_instance: int = Field(
        _STATE.limits.max_requests,
        ge=0,
        description="maximum open requests per instance, each sequence of a request counted (an instance below it takes a whole "
        "request); 0: unlimited",
    )
    max_kv_usage: float = Field(
        _STATE.limits.max_kv_usage,
        ge=0,
        le=1,
        description="share of KV in use from which an instance with waiting requests gets no new ones; 0: unlimited",
    )
    queue_size: int = Field(
        _STATE.queue.size, ge=0, description="maximum number of held requests per model; 0: none are held"
    )
    queue_timeout_s: float = Field(
        _STATE.queue.timeout_s, gt=0, description="maximum time that a request is held, in seconds"
    )
    queue_tenant_share: float = Field(
        _STATE.queue.tenant_share,
        gt=0,
        le=1,
        description="maximum share of a model's queue for one tenant while others want to wait",
    )
    queue_fair: Literal["off", "tenant", "program"] = Field(
        _STATE.queue.fair,
        description="whether tenants with held requests of one priority class are served by weight and cost (tenant), and of one "
        "tenant the programs, sessions with their sub-agents, that were served least go first (program); off: neither matters",
    )
    hold_expiry: Literal["place", "refuse"] = Field(
        _STATE.queue.expiry,
        description="what to do with a request that the policy held until the timeout: place it at once, or refuse it",
    )
    session_admission: bool = Field(
        _STATE.admission.on,
        description="park new sessions under every policy while the caches evict what sessions under way need again, and have "
        "no room for more; false: only where the policy auto does",
    )
    admission_standard_s: float = Field(
        _STATE.admission.standard_s,
        gt=0,
        description="maximum time that a new session of the class standard is parked, in seconds; 30 for the class "
        "interactive, 600 for batch",
    )
    circuit_failures: int = Field(
        _STATE.life.failures,
        ge=0,
        description="number of failed requests in a row after which an instance gets requests only on trial; 0: never",
    )
    lost_instance_s: float = Field(
        _STATE.lost_instance_s,
        gt=0,
        description="seconds that an idle instance is kept after its agent's stream has ended; one that answers stays",
    )
    migration_window_s: float = Field(
        _STATE.migration_window_s,
        ge=0,
        description="seconds that an offloaded request counts as a recent migration of its target",
    )
    stale_report_s: float = Field(
        _STATE.stale_report_s, gt=0, description="maximum age of an engine's load figures that are used, in seconds"
    )
    stale_keys_s: float = Field(
        _STATE.stale_keys_s,
        gt=0,
        description="seconds without a report after which an instance's cache counts as empty; must exceed agents' intervals",
    )
    max_keys: int = Field(
        _STATE.max_keys,
        ge=1,
        description="maximum number of block keys in the exact index; further instances use the approximate index, which has "
        "room for as many. So have the indexes of host memory and of storage; further instances get no credit for them",
    )
    startup_wait_s: float = Field(
        3.0, ge=0, description="maximum time to wait for instances' reports before placing, after a start, in seconds"
    )
    decision_log_size: int = Field(
        10_000, ge=1, description="maximum number of decisions in memory; fewer if they would exceed 140 MB"
    )
    decision_log_file: Path | None = Field(
        None, description="append every decision to this file, one JSON object a line"
    )
    decision_log_max_mb: int = Field(
        256,
        ge=0,
        description="size in MB above which decision_log_file is rotated; FILE.1 to FILE.4 are kept; 0: never rotated",
    )
    otlp_endpoint: OtlpEndpoint = Field(
        "", description="http(s)://HOST:PORT of an OTLP/gRPC collector for spans; empty: no spans"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")

    @field_validator("policy_settings", mode="before")
    @classmethod
    def _from_flag(cls, value: object) -> object:
        # The value from the environment is decoded JSON; the value of a flag is text.
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("queue_fair", mode="before")
    @classmethod
    def _as_before(cls, value: object) -> object:
        # Earlier versions had true and false.
        return {"true": "tenant", "false": "off"}.get(str(value).lower(), value)

    @field_validator("redis_url", "redis_sentinels")
    @classmethod
    def _list_of_urls(cls, value: SecretStr) -> SecretStr:
        split_urls(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _one_kind_of_redis(self) -> Self:
        if self.redis_sentinels.get_secret_value():
            if self.redis_cluster:
                raise ValueError("redis_cluster: a Redis Cluster has no Sentinels (redis_sentinels)")
            if len(split_urls(self.redis_url.get_secret_value())) != 1:
                raise ValueError("redis_sentinels: redis_url must be one URL, whose host and port are ignored")
        return self

    @property
    def redis_address(self) -> RedisAddress | None:
        """Where the shared Redis is; None without one."""
        urls = split_urls(self.redis_url.get_secret_value())
        sentinels = split_urls(self.redis_sentinels.get_secret_value())
        return RedisAddress(urls, sentinels, self.redis_master, self.redis_cluster) if urls else None

    def initial_policy(self, policies: Policies) -> Policy:
        """Return the policy at start, one of `policies`. Raises InvalidSetting."""
        try:
            return make_policy(self.policy, self.policy_settings, policies)
        except SettingError as error:
            field = place_of(error, self.policy_settings, "policy", "policy_settings")
            raise InvalidSetting(self, field, error.sentence) from None

    @property
    def ownerless_timeout_s(self) -> float:
        """The time that a pool may be without an owner that places, s. The sum of a dead owner's lease, another replica's wait
        for the preferred one, one more lease in case Redis has lost its data, this router's start-up wait, and 1 s of slack."""
        takeover_s = 3 * self.owner_lease_s if self.redis_address is not None else 0.0
        return takeover_s + self.startup_wait_s + 1.0

    @property
    def settle_s(self) -> float:
        """The age of another replica from which a pool may be handed over to it, s: a start-up wait like this one's, and three
        leases."""
        return self.startup_wait_s + 3 * self.owner_lease_s
