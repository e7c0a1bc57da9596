"""The way to the engines: one pool of connections, an allow-list of headers in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec
from multidict import CIMultiDictProxy

from services.gateway.choreography import Target
from services.gateway.settings import GatewaySettings

# uvicorn closes idle connections after 5 s; staying below avoids sending into one that is being closed.
KEEPALIVE_S = 3.0
FORWARD_UP = ("Content-Type", "Accept", "traceparent", "tracestate")
FORWARD_DOWN = ("Content-Type", "Content-Encoding", "Cache-Control", "Retry-After")
MAX_ERROR_BYTES = 1 << 20


class UpstreamError(Exception):
    """The instance failed. The text names no address; `status` is 0 when it never answered."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


class Upstream:
    """HTTP client of all instances. Open on entry, closed on exit."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the pool; it has no limit of its own, since the router is what limits load."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def post(
        self, target: Target, path: str, payload: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send one request; the answer's head. The caller closes or releases it. Raises UpstreamError."""
        assert self._session is not None, "start() comes first"
        sent = dict(headers)
        if target.rank is not None:
            sent["X-data-parallel-rank"] = str(target.rank)
        try:
            return await self._session.post(target.url + path, data=payload, headers=sent, allow_redirects=False)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UpstreamError(f"no answer: {type(error).__name__}") from error

    async def read(self, answer: aiohttp.ClientResponse) -> bytes:
        """The next piece of an answer's body, b"" at its end. Raises UpstreamError, also after idle_timeout_s of silence."""
        try:
            async with asyncio.timeout(self._settings.idle_timeout_s):
                return await answer.content.readany()
        except TimeoutError as error:
            raise UpstreamError("went silent", answer.status) from error
        except aiohttp.ClientError as error:
            raise UpstreamError(f"broke off: {type(error).__name__}", answer.status) from error

    async def read_all(self, answer: aiohttp.ClientResponse, limit: int = 0) -> bytes:
        """The whole body (its first `limit` bytes, when given). Raises UpstreamError."""
        parts: list[bytes] = []
        size = 0
        while piece := await self.read(answer):
            parts.append(piece)
            size += len(piece)
            if limit and size >= limit:
                return b"".join(parts)[:limit]
        return b"".join(parts)

    async def prefill(
        self, target: Target, model: str, ids: list[int], cache_salt: str, headers: Mapping[str, str]
    ) -> None:
        """Let an instance compute the KV of `ids`; its one token is thrown away. Raises UpstreamError."""
        body: dict[str, Any] = {"model": model, "prompt": ids, "max_tokens": 1, "stream": False, "temperature": 0}
        if cache_salt:
            body["cache_salt"] = cache_salt
        answer = await self.post(target, "/v1/completions", msgspec.json.encode(body), headers)
        try:
            await self.read_all(answer, MAX_ERROR_BYTES)
            if answer.status != 200:
                raise UpstreamError(f"status {answer.status}", answer.status)
        except BaseException:
            answer.close()
            raise
        answer.release()

    async def tokenize(self, url: str, body: dict[str, Any], within_s: float) -> list[int] | None:
        """The engine's own token ids, None when it refuses this body (4xx). Raises UpstreamError."""
        headers = {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(within_s):
                answer = await self.post(Target("", url), "/tokenize", msgspec.json.encode(body), headers)
                try:
                    raw = await self.read_all(answer)
                finally:
                    answer.release()
        except TimeoutError as error:
            raise UpstreamError("/tokenize took too long") from error
        if answer.status in (400, 422):
            return None
        if answer.status != 200:
            raise UpstreamError(f"/tokenize answered {answer.status}", answer.status)
        try:
            return msgspec.json.decode(raw, type=_Tokenized).tokens
        except msgspec.MsgspecError as error:
            raise UpstreamError("/tokenize answered no token ids") from error


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def down_headers(headers: CIMultiDictProxy[str]) -> dict[str, str]:
    """What of an instance's headers reaches the client."""
    return {name: headers[name] for name in FORWARD_DOWN if name in headers}
