"""A GET request by a connection of its own. A client that keeps connections and follows redirects takes twice the CPU time."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pointsman_common.core.addresses import address_of_url


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer, whose body can be read once."""

    status: int
    _headers: Mapping[str, str]
    _reader: asyncio.StreamReader

    async def body(self) -> bytes:
        """Return the whole body."""
        if self._headers.get("transfer-encoding", "").lower() == "chunked":
            parts = []
            while size := int((await self._reader.readuntil(b"\n")).partition(b";")[0], 16):
                parts.append(await self._reader.readexactly(size))
                await self._reader.readuntil(b"\n")
            return b"".join(parts)
        if (length := self._headers.get("content-length")) is not None:
            return await self._reader.readexactly(int(length))
        return await self._reader.read()

    async def json(self) -> Any:
        """Return the whole body, parsed as JSON."""
        return json.loads(await self.body())


@asynccontextmanager
async def get(
    url: str, timeout_s: float, headers: Mapping[str, str], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Answer]:
    """Send a request; close its connection after the block. `tls`: the trusted authorities, for an https URL. Raises OSError,
    TimeoutError if the block takes longer than `timeout_s`, and ValueError if the answer is not HTTP."""
    parts, address = urlsplit(url), address_of_url(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", "Connection": "close", **headers}
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "\r\n"]
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
            try:
                writer.write("\r\n".join(lines).encode())
                yield await _head(reader)
            finally:
                writer.close()
    except (EOFError, asyncio.LimitOverrunError) as error:
        raise ValueError(f"the answer is not whole: {error}") from error


async def _head(reader: asyncio.StreamReader) -> Answer:
    while True:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"the answer is not HTTP: {first[:40]!r}")
        fields = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in fields}
        if (status := int(rest[:3])) >= 200:
            return Answer(status, headers, reader)
