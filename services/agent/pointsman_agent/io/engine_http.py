"""HTTP client of an engine: its health; metrics at every scrape; models, version and event sources when the engine is new."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from errno import ECONNREFUSED
from typing import Any
from urllib.parse import quote

import msgspec

from pointsman_agent.core.engine_address import EngineAddress, offset_port
from pointsman_agent.core.engine_metrics import NAMES, Scrape, parse_metrics
from pointsman_agent.core.kv_transfer_support import engine_ids
from pointsman_agent.core.wire_numbers import uint32
from pointsman_agent.io.http_get import get
from pointsman_agent.io.kv_subscriber import KvEventSource
from pointsman_common.core.addresses import connect_endpoint
from pointsman_common.core.printable import printable

# Timeout of /metrics, s. A page may be slow to make on an engine that answers requests at once.
METRICS_ANSWER_S = 10.0
# Timeout of any other answer, s.
ANSWER_S = 2.0
# Timeout of a bootstrap server's answer, s. It answers at once, and loads wait meanwhile.
BOOTSTRAP_ANSWER_S = 0.5
# In the body of a 503 of vLLM while its data-parallel ranks change. Up to 0.32 /health answers this, too.
_SCALING = b"currently scaling"
_RESTRICTED = "/metrics/?" + "&".join(f"name[]={quote(name, safe=':')}" for name in NAMES)


# vLLM 0.22, 0.26 and 0.29 lack the route, 0.31 has it.
_NO_SOURCES = (
    "the engine does not tell where its KV events are (no GET /kv_event_sources): give the agent their addresses "
    "(engines=URL?events=tcp://HOST:5557&replay=tcp://HOST:5657)"
)


class ProbeError(Exception):
    """The engine did not answer, or its answer is not one of vLLM. The message says which. `status`: the HTTP status of the
    answer; 0 without one. `refused`: whether nothing listens at the address."""

    def __init__(self, reason: str, status: int = 0, *, refused: bool = False) -> None:
        # It may quote what the engine sent, and is shown in terminals and sent as text.
        super().__init__(printable(reason))
        self.status = status
        self.refused = refused


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Content of GET /v1/models: names of the model and of its adapters, the model's source, its maximum context in tokens."""

    served_names: tuple[str, ...]
    lora_names: tuple[str, ...]
    root: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class KvEventSources:
    """KV-event publishers by data-parallel rank. If there are none, `reason` says why."""

    by_rank: dict[int, KvEventSource]
    reason: str = ""


class EngineProbe:
    """An HTTP client of one engine.

    Each request has a new connection: a kept connection would always reach the same process behind a load balancer, and so hide
    the load balancer. And a new lookup: gateways follow a name that moves with their next connection.
    """

    def __init__(self, address: EngineAddress, *, api_key: str = "", tls: ssl.SSLContext | None = None) -> None:
        """`tls` has the trusted authorities for an HTTPS engine; None: the system's."""
        self._address = address
        self._tls = (tls or ssl.create_default_context()) if address.url.startswith("https:") else None
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._restricted = True

    async def alive(self) -> None:
        """GET /health. Returns if the engine answers and does not say that it is dead. Raises ProbeError; with a `status` if it
        says that."""
        try:
            async with get(f"{self._address.url}/health", ANSWER_S, self._headers, self._tls) as answer:
                # 4xx: a server without this route, or one that wants another key.
                if answer.status < 500 or (answer.status == 503 and _SCALING in await answer.body()):
                    return
                raise ProbeError(_refused("/health", answer.status), answer.status)
        except (OSError, ValueError) as error:
            raise _failed("/health", error) from error

    async def unavailable(self) -> bool:
        """Return whether the engine refuses all requests for a while: GET /v1/models answers 503. Raises ProbeError."""
        try:
            await self._json("/v1/models")
        except ProbeError as error:
            if error.status == 503:
                return True
            raise
        return False

    async def scrape(self) -> Scrape:
        """Read and parse /metrics. Raises ProbeError.

        vLLM mounts prometheus_client's own application beside the instrumented page. It renders only the requested series, at a
        tenth of the engine's cost. Servers without it, or with several API processes, are requested the whole page.
        """
        if self._restricted:
            found = await self._metrics(_RESTRICTED, missing_ok=True)
            if found is not None and found.ranks and (found.process_start is not None or found.bad):
                return found
        plain = await self._metrics("/metrics")
        assert plain is not None
        self._restricted = self._restricted and not plain.ranks
        if not plain.ranks:
            raise ProbeError("no vllm: series in /metrics (is the engine started with --disable-log-stats?)", 200)
        return plain

    async def paused(self) -> bool | None:
        """GET /is_paused; None if the engine has no such route (it exists with VLLM_SERVER_DEV_MODE=1). Raises ProbeError.

        /metrics does not show a pause. The answer comes from the scheduler's process, between two steps."""
        answer = await self._json("/is_paused", missing_ok=True)
        return bool(answer["is_paused"]) if "is_paused" in answer else None

    async def models(self) -> ServedModels:
        """GET /v1/models. Raises ProbeError."""
        entries = (await self._json("/v1/models")).get("data", [])
        try:
            entries = msgspec.convert(entries, list[dict[str, Any]])
            own = [entry for entry in entries if not entry.get("parent") and entry["id"]]
        except (msgspec.ValidationError, KeyError) as error:
            raise ProbeError(f"/v1/models: {error}", 200) from None
        if not own:
            raise ProbeError("/v1/models names no model", 200)
        try:
            max_model_len = uint32(own[0].get("max_model_len") or 0)
        except ValueError as error:
            raise ProbeError(f"/v1/models: max_model_len: {error}", 200) from None
        return ServedModels(
            served_names=tuple(entry["id"] for entry in own),
            lora_names=tuple(entry["id"] for entry in entries if entry.get("parent")),
            root=own[0].get("root") or own[0]["id"],
            max_model_len=max_model_len,
        )

    async def version(self) -> str:
        """GET /version; empty when the engine has no such route. Raises ProbeError."""
        answer = await self._json("/version", missing_ok=True)
        return str(answer.get("version", ""))

    async def sources(self, ranks: list[int]) -> KvEventSources:
        """Return the KV-event publishers of `ranks`, from the address's options, else from GET /kv_event_sources. Raises
        ProbeError."""
        address = self._address
        if address.events:
            several = len(ranks) > 1
            return KvEventSources(
                {
                    rank: KvEventSource(
                        offset_port(address.events, rank if several else 0),
                        offset_port(address.replay, rank if several else 0),
                        address.topic,
                    )
                    for rank in ranks
                }
            )
        try:
            answer = await self._json("/kv_event_sources")
        except ProbeError as error:
            if error.status != 404:
                raise
            return KvEventSources({}, _NO_SOURCES)
        by_rank = {int(rank): _source(config, address.host) for rank, config in answer.items() if _publishes(config)}
        if not by_rank:
            return KvEventSources({}, "the engine publishes no KV events (--kv-events-config)")
        if len(ranks) == 1 and len(by_rank) == 1:
            # With vLLM's external load balancing each rank is a separate server, and may number its source differently.
            by_rank = {ranks[0]: next(iter(by_rank.values()))}
        return KvEventSources(by_rank)

    async def engine_ids(self, bootstrap_url: str) -> dict[int, str]:
        """GET /query of the engine's bootstrap server: engine ids by data-parallel rank, as gateways read them. Empty if it does
        not answer."""
        try:
            # The server may be another host's, which must not get the engine's API key.
            tls = ssl.create_default_context() if bootstrap_url.startswith("https:") else None
            async with get(f"{bootstrap_url}/query", BOOTSTRAP_ANSWER_S, {}, tls) as answer:
                body = await answer.json() if answer.status == 200 else None
                return engine_ids(body) if isinstance(body, dict) else {}
        except (OSError, ValueError):
            return {}

    async def _metrics(self, path: str, *, missing_ok: bool = False) -> Scrape | None:
        try:
            headers = self._headers | {"Accept": "text/plain"}
            async with get(self._address.url + path, METRICS_ANSWER_S, headers, self._tls) as answer:
                if answer.status != 200:
                    if missing_ok and answer.status == 404:
                        return None
                    raise ProbeError(_refused(path.partition("?")[0], answer.status), answer.status)
                return parse_metrics(await answer.body())
        except (OSError, ValueError) as error:
            raise _failed(path.partition("?")[0], error) from error

    async def _json(self, path: str, *, missing_ok: bool = False) -> dict[str, Any]:
        try:
            async with get(self._address.url + path, ANSWER_S, self._headers, self._tls) as answer:
                if missing_ok and answer.status == 404:
                    return {}
                if answer.status != 200:
                    raise ProbeError(_refused(path, answer.status), answer.status)
                body = await answer.json()
        except (OSError, ValueError) as error:
            raise _failed(path, error) from error
        if not isinstance(body, dict):
            raise ProbeError(f"{path} did not answer with a JSON object", 200)
        return body


def _refused(path: str, status: int) -> str:
    hints = {
        **dict.fromkeys((401, 403), " (does engine_api_key fit the engine's --api-key?)"),
        404: " (is this the base URL of a vLLM server, without /v1?)",
    }
    return f"{path} answered {status}{hints.get(status, '')}"


def _failed(path: str, error: Exception) -> ProbeError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return ProbeError(f"{path}: the engine's certificate is not trusted ({error}): set engine_ca to its authority")
    if isinstance(error, ssl.SSLError):
        return ProbeError(f"no TLS connection ({error.strerror}): is its URL an http:// one?")
    if isinstance(error, TimeoutError):
        return ProbeError(f"{path}: no answer in time")
    if isinstance(error, OSError) and error.errno == ECONNREFUSED:
        return ProbeError("connection refused", refused=True)
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return ProbeError(f"cannot connect: {error.strerror or error}")
    return ProbeError(f"{path}: {type(error).__name__} {error}".rstrip())


def _publishes(config: Any) -> bool:
    return (
        isinstance(config, dict)
        and config.get("enable_kv_cache_events", True) is not False
        and config.get("publisher", "zmq") == "zmq"
        and bool(config.get("endpoint"))
    )


def _source(config: dict[str, Any], host: str) -> KvEventSource:
    # Without a buffer the replay socket returns no batch. The subscriber would take this for a publisher that started over.
    replay = config.get("replay_endpoint") if config.get("buffer_steps", 1) else None
    return KvEventSource(
        connect_endpoint(config["endpoint"], host), connect_endpoint(replay or "", host), config.get("topic") or ""
    )
