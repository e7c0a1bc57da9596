"""Settings of the gateway; each field is a flag and a POINTSMAN_GATEWAY_* variable."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_common.core.addresses import parse_address
from pointsman_common.io import settings as common
from pointsman_common.io.settings import Entries, HostPort, OptionalHostPort, OtlpEndpoint, Pairs, Targets, by_name
from pointsman_gateway.core.cors import ORIGIN
from pointsman_gateway.core.request.request_events import RequestTimeouts
from pointsman_gateway.core.tenants import MAX_SILENCE_S
from pointsman_gateway.io.http.server_types import ServerLimits


def _origins(value: list[str]) -> list[str]:
    wrong = [origin for origin in value if not ORIGIN.fullmatch(origin)]
    if wrong:
        raise ValueError(
            f"no origin: {wrong[0]} (SCHEME://HOST or SCHEME://HOST:PORT in lower case, without a path, or *)"
        )
    return value


Origins = Annotated[Entries, AfterValidator(_origins)]


class GatewaySettings(BaseSettings):
    """Settings of one gateway process. Times are seconds."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_GATEWAY_")
    REMOVED: ClassVar = {"continued_per_minute": "600"}  # former settings -> what counts now, for messages

    listen: HostPort = Field("127.0.0.1:8080", description="HOST:PORT to serve HTTP on; port 0 picks a free one")
    tls_cert: Path | None = Field(None, description="certificate chain (PEM): HTTPS instead of HTTP; with tls_key")
    tls_key: Path | None = Field(None, description="private key of tls_cert (PEM)")
    tls_client_ca: Path | None = Field(
        None,
        description="CA certificates (PEM) that client certificates are verified with; set: clients must "
        "send a certificate besides their key",
    )
    ext_proc_listen: OptionalHostPort = Field(
        "",
        description="HOST:PORT to serve Envoy's external processing on, as an endpoint picker of the Gateway API Inference "
        "Extension; empty: none",
    )
    ext_proc_fallbacks: int = Field(
        2,
        ge=0,
        le=8,
        description="number of endpoints that a proxy gets besides the chosen one, to which it may send a request that the "
        "chosen one does not answer; 0 for proxies that take no list (Envoy's ORIGINAL_DST clusters)",
    )
    ext_proc_cert: Path | None = Field(
        None, description="certificate chain (PEM) of ext_proc_listen: TLS; with ext_proc_key"
    )
    ext_proc_key: Path | None = Field(None, description="private key of ext_proc_cert (PEM)")
    ext_proc_client_ca: Path | None = Field(
        None,
        description="CA certificates (PEM) that proxies' certificates are verified with; set: proxies must send one",
    )
    routers: Targets = Field(
        default_factory=lambda: ["127.0.0.1:50051"], description="routers as HOST:PORT, tried in this order"
    )
    tokenizers: Pairs = Field(
        default_factory=list,
        description="MODEL=PATH, MODEL=HUB_ID or MODEL=HUB_ID@REVISION; for other models the source that "
        "their engines report: a hub id (downloaded into HF_HOME) or a folder (mounted at the "
        "same path)",
    )
    hub_owners: Entries = Field(
        default_factory=list,
        description="owners, or OWNER/NAME, whose tokenizers may be downloaded when an engine reports them; empty: all",
    )
    engine_cache: Path | None = Field(
        None, description="HF_HOME of the engines, only read; searched after HF_HOME and before the hub"
    )
    aliases: Pairs = Field(
        default_factory=list,
        description="NAME=MODEL: clients may request NAME and get MODEL; answers carry MODEL's own name",
    )
    api_keys_file: Path | None = Field(
        None,
        description="file with lines TENANT:KEY [requests_per_minute=N] [tokens_per_minute=N] [in_flight=N] "
        "[cache_salt=TEXT] [priority=batch|standard|interactive] [weight=N] [silence_s=N], read again when it changes; without "
        "keys every client may call",
    )
    engine_api_key: common.Secret = Field(
        SecretStr(""), description="API key of engines that are started with --api-key"
    )
    engine_ca: Path | None = Field(
        None,
        description="CA certificates (PEM) that HTTPS engines' certificates are verified with; empty: the system's",
    )
    expose_placement: bool = Field(
        True,
        description="send decision and instance in answers' headers, and answer dry runs; instance ids are addresses",
    )
    mark_session_ends: bool = Field(
        False,
        description="tell engines which request is the last of its session, for the connector package's cache policy of vLLM's "
        "CPU offloading tier",
    )
    agent_headers: bool = Field(
        True,
        description="know sessions, and who started them, also by the headers of agents' programs (Claude Code, Codex, OpenCode, "
        "Dynamo's clients)",
    )
    client_cache_salt: bool = Field(False, description="let clients set cache_salt")
    token_cache_mb: int = Field(
        128, ge=0, description="maximum size of the cache of texts' tokens and block keys, in MiB"
    )
    max_connections: int = Field(
        ServerLimits.max_connections,
        gt=0,
        description="maximum number of clients' open connections of each process, with TLS handshakes; further ones replace the "
        "longest idle ones, or get 503 if all have requests, but for probes. A busy one takes two file descriptors",
    )
    max_body_bytes: int = Field(32 << 20, gt=0, description="maximum size of a request body, in bytes")
    max_sequences: int = Field(
        1 << 14,
        gt=0,
        description="maximum number of sequences of one request: its prompts, times the answers (`n`) to each; more is refused "
        "with 400. Engines have maxima of their own (VLLM_MAX_N_SEQUENCES, VLLM_MAX_COMPLETION_PROMPTS)",
    )
    max_buffered_body_bytes: int = Field(
        256 << 20,
        gt=0,
        description="maximum size of all clients' request bodies that are held until their answers begin, in "
        "bytes; more is refused with 503. A byte of a body takes about five bytes of memory",
    )
    max_buffered_answer_bytes: int = Field(
        ServerLimits.max_buffered_answer_bytes,
        gt=0,
        description="maximum size of all clients' answers that are not streamed, from their first byte until "
        "they are sent, in bytes; more is refused with 503",
    )
    cors_origins: Origins = Field(
        default_factory=list,
        description="origins (SCHEME://HOST[:PORT]) whose pages may read answers in a browser (CORS); separated by blanks; `*` "
        "in HOST stands for characters, as PORT for any port, and alone for all pages",
    )
    body_timeout_s: float = Field(
        ServerLimits.body_s, gt=0, description="maximum time for a request's whole body to arrive, in seconds"
    )
    keepalive_timeout_s: float = Field(
        ServerLimits.idle_s,
        gt=0,
        description="time after which a client's idle connection is closed, in seconds; more than "
        "proxies and clients keep theirs (Envoy: 1 h), so that no request meets a connection that is being closed",
    )
    placement_timeout_s: float = Field(
        RequestTimeouts.placement_s,
        gt=0,
        description="maximum wait for the router's first step, a hold included, in seconds",
    )
    first_byte_timeout_s: float = Field(
        RequestTimeouts.first_byte_s, gt=0, description="maximum wait for a stream's first byte, in seconds"
    )
    prefill_timeout_s: float = Field(
        RequestTimeouts.prefill_s,
        gt=0,
        description="maximum duration of a PREFILL step, in seconds; then the request is colocated",
    )
    transfer_timeout_s: float = Field(
        RequestTimeouts.transfer_s,
        gt=0,
        description="maximum time for KV to arrive from another instance, in seconds; then the request is colocated. A fetch "
        "of a cached prefix has 5 s and 0.5 ms for each token, if that is less",
    )
    response_timeout_s: float = Field(
        3600.0, gt=0, description="maximum wait for an answer that is not streamed, in seconds"
    )
    idle_timeout_s: float = Field(
        ServerLimits.stall_s,
        gt=0,
        description="maximum time between two pieces of an answer, in seconds; also how long a client may "
        "read more slowly than min_read_bytes_per_s",
    )
    min_read_bytes_per_s: int = Field(
        ServerLimits.min_read_bytes_per_s,
        ge=0,
        description="minimum rate at which a client must read a waiting answer, in bytes per second; slower "
        "clients are disconnected",
    )
    silence_s: float = Field(
        0.0,
        ge=0,
        le=MAX_SILENCE_S,
        description="time without a byte after which the client of a stream gets a head, with status 200, and a ping, and "
        "then interval of pings, in seconds; what fails after that is an error event; a key may have its own; 0: no pings",
    )
    router_grace_s: float = Field(
        0.5, ge=0, description="maximum wait for a lost router before placing without it, in seconds"
    )
    continue_mb: int = Field(
        256,
        ge=0,
        description="maximum size of the bodies that are kept while their answers are streamed, in MiB, so that another "
        "instance can go on with an answer whose instance is gone; 0: no answer is continued",
    )
    drain_timeout_s: float = Field(
        3600.0,
        ge=0,
        description="maximum time for open requests to end after SIGTERM, in seconds; a second SIGTERM ends "
        "them at once",
    )
    processes: int = Field(
        1,
        gt=0,
        le=256,
        description="number of gateway processes that share the address and the keys' limits; each knows "
        "only its own sessions",
    )
    gateway_id: str = Field(
        default_factory=lambda: f"gw-{uuid.uuid4().hex[:12]}",
        description="unique id of this gateway; each process registers with routers under this id and random characters",
    )
    breakdown_file: Path | None = Field(
        None,
        description="file to which a line of JSON is appended for each attempt: its instances, and when each "
        "part began and ended",
    )
    breakdown_max_mb: int = Field(
        256,
        ge=0,
        description="size in MB above which breakdown_file is rotated; FILE.1 to FILE.4 are kept; 0: never rotated",
    )
    usage_file: Path | None = Field(
        None,
        description="file to which a line of JSON is appended for each request of a tenant, for billing: its "
        "tokens, model, id and outcome; never rotated, may be renamed while it is written",
    )
    otlp_endpoint: OtlpEndpoint = Field(
        "", description="http(s)://HOST:PORT of an OTLP/gRPC collector for spans; empty: no spans"
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share of requests that are traced, among those without a trace of the client"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")

    @field_validator("routers")
    @classmethod
    def _some_router(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("needs at least one router, each as HOST:PORT")
        return value

    @field_validator("aliases")
    @classmethod
    def _one_each(cls, value: list[str]) -> list[str]:
        if any("=" in entry.partition("=")[2] for entry in value):
            raise ValueError("an alias is NAME=MODEL; several are separated by blanks")
        return value

    @model_validator(mode="after")
    def _whole_tls(self) -> GatewaySettings:
        for of, cert, key, client_ca in (
            ("tls", self.tls_cert, self.tls_key, self.tls_client_ca),
            ("ext_proc", self.ext_proc_cert, self.ext_proc_key, self.ext_proc_client_ca),
        ):
            if (cert is None) is not (key is None) or (client_ca and not cert):
                raise ValueError(f"{of}_cert and {of}_key belong together, and {of}_client_ca needs both")
        return self

    @model_validator(mode="after")
    def _room_for_one(self) -> GatewaySettings:
        if self.max_buffered_body_bytes < self.max_body_bytes:
            raise ValueError("max_buffered_body_bytes must be at least max_body_bytes")
        return self

    @property
    def url(self) -> str:
        """The base URL of the API as `listen` has it, also with a wildcard as its host; empty if its port is chosen at start."""
        scheme = "http" if self.tls_cert is None else "https"
        return f"{scheme}://{self.listen}" if parse_address(self.listen).port else ""

    def alias_map(self) -> dict[str, str]:
        """Return a map from the requested name to the served name."""
        return by_name(self.aliases)

    def tokenizer_paths(self) -> dict[str, str]:
        """Return a map from model to path or hub id, from `tokenizers`."""
        return by_name(self.tokenizers)
