"""The metrics page of several gateway processes on one port: any of them answers for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from pointsman_common.io.metrics_page import PIECE, PacedPage, Piece, pieces, written

# Timeout of the request for a sibling's metrics, s. A page waits for a sibling that hangs, and readers wait for 10 s or more.
ASK_S = 4.0
_LENGTH_BYTES = 4
# Metrics of which the page has the minimum of all processes. All others are summed: counters, histograms, open requests, cache
# sizes.
_LEAST = (
    "pointsman_gateway_limit_gateways",
    "pointsman_gateway_limits_accounted",
    "pointsman_gateway_router_connected",
    "pointsman_gateway_tokenizer_exact",
    "pointsman_gateway_tokenizer_fast",
)


class SiblingProcesses:
    """Process `number` of `count` processes, which reach each other through Unix sockets in `folder`."""

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self.number = number
        self.count = count
        self._folder = folder
        self._server: asyncio.Server | None = None

    @property
    def limits_file(self) -> Path:
        """The file in which the processes count the usage of API keys."""
        return self._folder / "limits"

    async def start(self, registry: CollectorRegistry) -> None:
        """Tell the siblings the metrics of `registry`."""
        metrics = PacedPage(lambda: snapshot(registry))

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                for data in await metrics.get():
                    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
                    await writer.drain()
                writer.write(bytes(_LENGTH_BYTES))
            except ConnectionError:
                pass  # the sibling has ended or does not wait any longer
            finally:
                writer.close()

        path = self._folder / str(self.number)
        path.unlink(missing_ok=True)  # the socket of the process that this one replaces
        self._server = await asyncio.start_unix_server(tell, path)

    async def close(self) -> None:
        """Stop serving the page."""
        if self._server is not None:
            self._server.close()

    async def page(self) -> bytes:
        """Return the metrics of all processes that answer, as one page with the number of these processes."""
        snapshots = await asyncio.gather(*(self._ask(number) for number in range(self.count)))
        return await merged([snapshot for snapshot in snapshots if snapshot])

    async def _ask(self, number: int) -> list[bytes]:
        found: list[bytes] = []
        try:
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_unix_connection(self._folder / str(number))
                try:
                    while length := int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big"):
                        found.append(await reader.readexactly(length))
                finally:
                    writer.close()
        except (OSError, EOFError, TimeoutError):
            return []  # the process is being replaced; the page counts only processes that answered
        return found


_DECODER = msgspec.msgpack.Decoder(Piece)


async def snapshot(registry: CollectorRegistry) -> list[bytes]:
    """Return the metrics of `registry` as numbers, piece by piece, for merged()."""
    return [msgspec.msgpack.encode(piece) async for piece in pieces(registry.collect())]


async def merged(snapshots: list[list[bytes]]) -> bytes:
    """Return the metrics of several processes as one page. Values are summed; metrics of _LEAST take the minimum. The event loop
    runs other tasks between two pieces of it."""
    heads: dict[str, str] = {}
    values: dict[str, dict[str, float]] = {}
    for of_process in snapshots:
        for data in of_process:
            piece = _DECODER.decode(data)
            heads.setdefault(piece.name, piece.head)
            of_family = values.setdefault(piece.name, {})
            least = piece.name in _LEAST
            for series, value in piece.series:
                before = of_family.get(series)
                of_family[series] = value if before is None else min(before, value) if least else before + value
            await asyncio.sleep(0)
    count = GaugeMetricFamily(
        "pointsman_gateway_processes", "Gateway processes included in these metrics", len(snapshots)
    )

    async def summed() -> AsyncIterator[Piece]:
        for name, head in heads.items():
            # Families are freed one by one, for which they are taken out.
            series = iter(values.pop(name).items())
            while found := [*islice(series, PIECE)]:
                yield Piece(name, head, found)
                await asyncio.sleep(0)
            yield Piece(name, head, [])
        async for piece in pieces([count]):
            yield piece

    return await written(summed())
