"""The metrics page of several gateway processes on one port: any of them answers for all.

Counters of a process that has died stay in the sums, as it told them last: Prometheus takes a sum that falls for one that began
at 0 again, and would count what the others have counted a second time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from pointsman_common.io.metrics_page import PacedPage, Piece, pieces, written
from pointsman_common.io.metrics_snapshot import InheritedCounters, counters_in, encoded, keep, summed
from pointsman_gateway.io.telemetry.metrics import GONE_MODEL_S

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
        self._inherited = InheritedCounters("pointsman_gateway_prompt_tokens_mismatch", GONE_MODEL_S)

    @property
    def limits_file(self) -> Path:
        """The file in which the processes count the usage of API keys."""
        return self._folder / "limits"

    async def start(self, registry: CollectorRegistry) -> None:
        """Tell the siblings the metrics of `registry`, with the counters of the process that this one replaces."""
        await self._inherited.read(self._kept(self.number))
        metrics = PacedPage(lambda: self._snapshot(registry))

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
        """Stop serving the page. Remove the folder if the parent, which would do so, has died."""
        if self._server is not None:
            self._server.close()
        if (parent := multiprocessing.parent_process()) is not None and not parent.is_alive():
            shutil.rmtree(self._folder, ignore_errors=True)

    async def page(self) -> bytes:
        """Return the metrics of all processes that answer, as one page with the number of these processes. Of the others it has
        the counters that they told last."""
        told = await asyncio.gather(*(self._ask(number) for number in range(self.count)))
        silent = [self._kept(number) for number, found in enumerate(told) if not found]
        return await merged([*filter(None, told)], [await asyncio.to_thread(counters_in, file) for file in silent])

    def _kept(self, number: int) -> Path:
        return self._folder / f"{number}.told"

    async def _snapshot(self, registry: CollectorRegistry) -> Sequence[bytes]:
        found = await self._inherited.with_own(await encoded(pieces(registry.collect())), _LEAST)
        await asyncio.to_thread(keep, self._kept(self.number), found)
        return found

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
            return []  # the process is being replaced
        return found


async def merged(snapshots: list[list[bytes]], counters: Sequence[list[bytes]] = ()) -> bytes:
    """Return the metrics of several processes as one page, with the counters of others that do not answer. Values are summed;
    metrics of _LEAST take the minimum. The event loop runs other tasks between two pieces of it."""
    count = GaugeMetricFamily(
        "pointsman_gateway_processes", "Gateway processes that answered for these metrics", len(snapshots)
    )

    async def found() -> AsyncIterator[Piece]:
        async for piece in summed([*snapshots, *counters], _LEAST):
            yield piece
        async for piece in pieces([count]):
            yield piece

    return await written(found())
