"""The gateway's settings: flags and POINTSMAN_GATEWAY_* variables from the same fields."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman.common.io.settings import Entries, HostPort, OtlpEndpoint, Pairs, by_name
from pointsman.gateway.core.cors import ORIGIN
from pointsman.gateway.core.request.request_events import RequestTimeouts
from pointsman.gateway.io.http.server_types import ServerLimits


def _origins(value: list[str]) -> list[str]:
    wrong = [one for one in value if not ORIGIN.fullmatch(one)]
    if wrong:
        raise ValueError(f"no origin: {wrong[0]} (https://HOST or https://HOST:PORT in lower case, without a path)")
    return value


Origins = Annotated[Entries, AfterValidator(_origins)]


class GatewaySettings(BaseSettings):
    """Settings of one gateway process. Times are seconds."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_GATEWAY_")

    listen: HostPort = Field("127.0.0.1:8080", description="HOST:PORT to serve HTTP on; port 0 picks a free one")
    tls_cert: Path | None = Field(None, description="certificate chain (PEM): HTTPS instead of HTTP; with tls_key")
    tls_key: Path | None = Field(None, description="private key of tls_cert (PEM)")
    tls_client_ca: Path | None = Field(
        None, description="certificates (PEM) of whom clients must show a certificate, besides their keys"
    )
    routers: Entries = Field(
        default_factory=lambda: ["127.0.0.1:50051"], description="routers as HOST:PORT, tried in this order"
    )
    tokenizers: Pairs = Field(
        default_factory=list,
        description="MODEL=PATH, MODEL=HUB_ID or MODEL=HUB_ID@REVISION; other models' tokenizers are where their engines have "
        "theirs from: a hub id, downloaded into HF_HOME, or a folder, mounted at the same place",
    )
    hub_owners: Entries = Field(
        default_factory=list,
        description="owners, or OWNER/NAME, of whom tokenizers may be downloaded because an engine names them; none: all",
    )
    engine_cache: Path | None = Field(
        None, description="HF_HOME of engines, which is only read: looked into after HF_HOME, before the hub is asked"
    )
    aliases: Pairs = Field(
        default_factory=list,
        description="NAME=MODEL: clients may ask for NAME and get MODEL, which answers by its own name",
    )
    api_keys_file: Path | None = Field(
        None,
        description="file with lines TENANT:KEY [requests_per_minute=N] [tokens_per_minute=N] [in_flight=N] "
        "[cache_salt=TEXT] [priority=batch|standard|interactive] [weight=N], read again when it changes; without keys every "
        "client may call",
    )
    engine_api_key: SecretStr = Field(SecretStr(""), description="what engines started with --api-key ask for")
    engine_ca: Path | None = Field(
        None,
        description="certificates (PEM) that engines' own are signed by, where they are served by HTTPS; else the system's",
    )
    expose_placement: bool = Field(
        True,
        description="name decision and instance in answers' headers, and explain dry runs; instance ids are addresses",
    )
    client_cache_salt: bool = Field(False, description="let clients set cache_salt")
    token_cache_mb: int = Field(128, ge=0, description="room for tokens and keys of texts seen before, in MiB")
    max_body_bytes: int = Field(32 << 20, gt=0, description="largest request body in bytes")
    max_buffered_body_bytes: int = Field(
        256 << 20,
        gt=0,
        description="request bodies held at once, of all clients, until their answers begin; more is a 503. A byte of a body "
        "takes about five of memory",
    )
    max_buffered_answer_bytes: int = Field(
        ServerLimits.max_buffered_answer_bytes,
        gt=0,
        description="answers that are not streamed, held at once of all clients, from their first byte until they are sent; more "
        "is a 503",
    )
    cors_origins: Origins = Field(
        default_factory=list,
        description="origins (https://HOST[:PORT]) whose pages may read answers in a browser (CORS); separated by blanks",
    )
    body_timeout_s: float = Field(ServerLimits.body_s, gt=0, description="for a request's whole body to arrive")
    keepalive_timeout_s: float = Field(
        ServerLimits.idle_s, gt=0, description="until a client's idle connection is closed"
    )
    placement_timeout_s: float = Field(
        RequestTimeouts.placement_s, gt=0, description="until the router names the first step, a hold included"
    )
    first_byte_timeout_s: float = Field(RequestTimeouts.first_byte_s, gt=0, description="until a stream's first byte")
    prefill_timeout_s: float = Field(
        RequestTimeouts.prefill_s, gt=0, description="until a PREFILL step's end; then the answer is colocated"
    )
    transfer_timeout_s: float = Field(
        RequestTimeouts.transfer_s,
        gt=0,
        description="until KV has come from another instance; then the answer is colocated",
    )
    response_timeout_s: float = Field(3600.0, gt=0, description="until an answer that is not streamed begins")
    idle_timeout_s: float = Field(
        ServerLimits.stall_s,
        gt=0,
        description="between two pieces of an answer; and how long a client may read more slowly than min_read_bytes_per_s",
    )
    min_read_bytes_per_s: int = Field(
        ServerLimits.min_read_bytes_per_s,
        ge=0,
        description="what a client takes at least of an answer that waits to be sent; slower ones are closed",
    )
    router_grace_s: float = Field(0.5, ge=0, description="wait for a lost router before placing without it")
    drain_timeout_s: float = Field(
        3600.0, ge=0, description="after SIGTERM, for open requests to end; a second SIGTERM ends them at once"
    )
    processes: int = Field(
        1,
        gt=0,
        le=256,
        description="gateways that share the address and the keys' limits; each knows its own sessions",
    )
    gateway_id: str = Field(
        default_factory=lambda: f"gw-{uuid.uuid4().hex[:12]}",
        description="unique for this gateway; routers know each process by it and random characters",
    )
    breakdown_file: Path | None = Field(
        None,
        description="append a line of JSON for each attempt: where it went and when each part of it began and ended",
    )
    breakdown_max_mb: int = Field(
        256,
        ge=0,
        description="rotate breakdown_file before it is larger than this; FILE.1 to FILE.4 stay; 0: leave that to others",
    )
    usage_file: Path | None = Field(
        None,
        description="append a line of JSON for each request of a tenant, for billing: its tokens, model, id and end; never "
        "rotated, and may be renamed while it is written",
    )
    otlp_endpoint: OtlpEndpoint = Field(
        "", description="http(s)://HOST:PORT of an OTLP/gRPC collector that spans go to; empty: none are made"
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share traced of the requests whose client brings no trace of its own"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level to log")

    @field_validator("routers")
    @classmethod
    def _some_router(cls, value: list[str]) -> list[str]:
        if not value or not all(address.rpartition(":")[2].isdigit() for address in value):
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
        if (self.tls_cert is None) is not (self.tls_key is None) or (self.tls_client_ca and not self.tls_cert):
            raise ValueError("tls_cert and tls_key belong together, and tls_client_ca needs both")
        return self

    @model_validator(mode="after")
    def _room_for_one(self) -> GatewaySettings:
        if self.max_buffered_body_bytes < self.max_body_bytes:
            raise ValueError("max_buffered_body_bytes must be at least max_body_bytes")
        return self

    def alias_map(self) -> dict[str, str]:
        """Name asked for -> name served."""
        return by_name(self.aliases)

    def tokenizer_paths(self) -> dict[str, str]:
        """Model -> path or hub id, as given by `tokenizers`."""
        return by_name(self.tokenizers)
