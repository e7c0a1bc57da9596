"""The metrics page of several gateway processes on one port: any of them answers for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from pointsman_common.io.metrics_page import PIECE, PacedPage, pieces, written

# Timeout of the request for a sibling's metrics, s: it takes them at most once a second.
ASK_S = 4.0
_LENGTH_BYTES = 4
# Metrics of which the page has the minimum of all processes. All others are summed: counters, histograms, open requests, cache
# sizes.
_LEAST = (
    "pointsman_gateway_limit_gateways",
    "pointsman_gateway_limits_accounted",
    "pointsman_gateway_router_connected",
    "pointsman_gateway_tokenizer_exact",
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
                writer.write(await metrics.get())
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

    async def _ask(self, number: int) -> bytes:
        try:
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_unix_connection(self._folder / str(number))
                try:
                    return await reader.read(-1)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""  # the process is being replaced; the page counts only processes that answered


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some samples of a metric family: name, labels and value of each."""

    family: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


_DECODER = msgspec.msgpack.Decoder(_Piece)


async def snapshot(registry: CollectorRegistry) -> bytes:
    """Return the metrics of `registry` as numbers, for merged()."""
    found = bytearray()
    async for part in pieces(registry.collect()):
        samples = [(sample.name, sample.labels, sample.value) for sample in part.samples]
        data = msgspec.msgpack.encode(_Piece(part.name, part.documentation, part.type, samples))
        found += len(data).to_bytes(_LENGTH_BYTES, "big") + data
    return bytes(found)


async def _pieces_of(data: bytes) -> AsyncIterator[_Piece]:
    at = 0
    while at < len(data):
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(data[at:begin], "big")
        yield _DECODER.decode(data[begin:at])
        await asyncio.sleep(0)


async def merged(snapshots: list[bytes]) -> bytes:
    """Return the metrics of several processes as one page. Values are summed; metrics of _LEAST and creation times take the
    minimum. The event loop runs other tasks between two pieces of it."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for data in snapshots:
        async for piece in _pieces_of(data):
            families.setdefault(piece.family, Metric(piece.family, piece.documentation, piece.type))
            of_family = values.setdefault(piece.family, {})
            for name, labels, value in piece.samples:
                key, least = (name, tuple(labels.items())), piece.family in _LEAST or name.endswith("_created")
                before = of_family.get(key)
                of_family[key] = value if before is None else min(before, value) if least else before + value
    for family, of_family in values.items():
        for at, ((name, label_pairs), value) in enumerate(of_family.items(), 1):
            families[family].add_sample(name, dict(label_pairs), value)
            if not at % PIECE:
                await asyncio.sleep(0)
    count = GaugeMetricFamily(
        "pointsman_gateway_processes", "Gateway processes included in these metrics", len(snapshots)
    )
    return await written([*families.values(), count])
