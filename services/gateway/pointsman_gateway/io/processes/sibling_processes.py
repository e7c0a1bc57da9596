"""The metrics page of several gateway processes on one port: any of them answers for all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# Timeout of the request for a sibling's page, s.
ASK_S = 2.0
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
        """Serve the page of `registry` to the siblings."""

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(generate_latest(registry))
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
        pages = await asyncio.gather(*(self._ask(number) for number in range(self.count)))
        return merged([page for page in pages if page])

    async def _ask(self, number: int) -> str:
        try:
            async with asyncio.timeout(ASK_S):
                reader, writer = await asyncio.open_unix_connection(self._folder / str(number))
                try:
                    return (await reader.read(-1)).decode()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return ""  # the process is being replaced; the page counts only processes that answered


def merged(pages: list[str]) -> bytes:
    """Return the pages of several processes as one. Values are summed; metrics of _LEAST and creation times take the minimum."""
    families: dict[str, Metric] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            least = family.name in _LEAST or family.name.endswith("_created")
            for sample in family.samples:
                key = (family.name, sample.name, tuple(sample.labels.items()))
                before = values.get(key)
                if before is None:
                    values[key] = sample.value
                else:
                    values[key] = min(before, sample.value) if least else before + sample.value
    for (family_name, name, labels), value in values.items():
        families[family_name].add_sample(name, dict(labels), value)
    count = GaugeMetricFamily("pointsman_gateway_processes", "Gateway processes included in these metrics", len(pages))
    registry = CollectorRegistry()
    registry.register(_Given([*families.values(), count]))
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)
