"""HTTP client of an engine: metrics at every scrape; models, version and event sources when the engine is new."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from pointsman_agent.core.engine_address import EngineAddress, connect_address, offset_port
from pointsman_agent.core.engine_metrics import NAMES, Scrape, parse_metrics
from pointsman_agent.core.kv_transfer_support import engine_ids
from pointsman_agent.core.wire_numbers import uint32
from pointsman_agent.io.kv_subscriber import KvEventSource

# Timeout of a bootstrap server's answer, s. It answers at once, and loads wait meanwhile.
BOOTSTRAP_ANSWER_S = 0.5
_RESTRICTED = "/metrics/?" + "&".join(f"name[]={quote(name, safe=':')}" for name in NAMES)


class ProbeError(Exception):
    """The engine did not answer, or its answer is not one of vLLM. The message says which."""


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
    """An HTTP client of one engine."""

    def __init__(
        self, address: EngineAddress, *, timeout_s: float, api_key: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        """`tls` has the trusted authorities for an HTTPS engine; None: the system's."""
        self._address = address
        # A new connection per request: a kept connection would always reach the same process behind a load balancer, and so
        # hide the load balancer.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, ssl=True if tls is None else tls),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        )
        self._restricted = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def scrape(self) -> Scrape:
        """Read and parse /metrics. Raises ProbeError.

        vLLM mounts prometheus_client's own application beside the instrumented page. It renders only the requested series, at a
        tenth of the engine's cost. Servers without it, or with several API processes, are requested the whole page.
        """
        if self._restricted:
            found = await self._metrics(_RESTRICTED, missing_ok=True)
            if found is not None and found.ranks and found.process_start is not None:
                return found
        plain = await self._metrics("/metrics")
        assert plain is not None
        self._restricted = self._restricted and not plain.ranks
        if not plain.ranks:
            raise ProbeError("no vllm: series in /metrics (is the engine started with --disable-log-stats?)")
        return plain

    async def paused(self) -> bool | None:
        """GET /is_paused; None if the engine has no such route (it exists with VLLM_SERVER_DEV_MODE=1). Raises ProbeError.

        /metrics does not show a pause. The answer comes from the scheduler's process, between two steps."""
        answer = await self._json("/is_paused", missing_ok=True)
        return bool(answer["is_paused"]) if "is_paused" in answer else None

    async def models(self) -> ServedModels:
        """GET /v1/models. Raises ProbeError."""
        entries = (await self._json("/v1/models")).get("data", [])
        own = [entry for entry in entries if not entry.get("parent")]
        if not own:
            raise ProbeError("/v1/models names no model")
        try:
            max_model_len = uint32(own[0].get("max_model_len") or 0)
        except ValueError as error:
            raise ProbeError(f"/v1/models: max_model_len: {error}") from None
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
        answer = await self._json("/kv_event_sources", missing_ok=True)
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
            # A session of its own, since the server may be another host's, which must not get the engine's API key.
            timeout = aiohttp.ClientTimeout(total=BOOTSTRAP_ANSWER_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{bootstrap_url}/query") as answer,
            ):
                body = await answer.json() if answer.status == 200 else None
                return engine_ids(body) if isinstance(body, dict) else {}
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return {}

    async def _metrics(self, path: str, *, missing_ok: bool = False) -> Scrape | None:
        try:
            async with self._session.get(_url(self._address.url, path), headers={"Accept": "text/plain"}) as answer:
                if answer.status != 200:
                    if missing_ok and answer.status == 404:
                        return None
                    raise ProbeError(_refused(path.partition("?")[0], answer.status))
                return parse_metrics(await answer.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ProbeError(_failed(path.partition("?")[0], error)) from error

    async def _json(self, path: str, *, missing_ok: bool = False) -> dict[str, Any]:
        try:
            async with self._session.get(_url(self._address.url, path)) as answer:
                if missing_ok and answer.status == 404:
                    return {}
                if answer.status != 200:
                    raise ProbeError(_refused(path, answer.status))
                body = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ProbeError(_failed(path, error)) from error
        if not isinstance(body, dict):
            raise ProbeError(f"{path} did not answer with a JSON object")
        return body


def _refused(path: str, status: int) -> str:
    hint = " (does engine_api_key fit the engine's --api-key?)" if status in (401, 403) else ""
    return f"{path} answered {status}{hint}"


def _failed(path: str, error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"{path}: the engine's certificate is not trusted ({error.certificate_error}): set engine_ca to its authority"
    return f"{path}: {type(error).__name__} {error}".rstrip()


def _url(base: str, path: str) -> Any:
    from yarl import URL

    return URL(base + path, encoded=True)


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
        connect_address(config["endpoint"], host), connect_address(replay, host), config.get("topic") or ""
    )
