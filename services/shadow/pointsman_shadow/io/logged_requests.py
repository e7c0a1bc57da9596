"""Reads the requests of a log in the order of their arrival, and counts the lines that cannot be used by their causes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import structlog

from pointsman_gateway.core.http_message import Headers
from pointsman_lab.simulation.counterfactual import ObservedRequest
from pointsman_lab.workload.trace_files import lines_of
from pointsman_shadow.core.access_log import LineError, LogLine, read_line
from pointsman_shadow.core.pending_requests import PendingRequests
from pointsman_shadow.io.request_reader import RequestReader, UnusableRequest

log = structlog.get_logger()

# What is told of a log of which no request can be used.
FORMATS = "docs/shadow.md lists the fields of a line"
# Reasons of UnusableRequest, which are a metric's labels, as they are told with a number of lines.
_TOLD = {
    "model": "for models without a tokenizer or engines here",
    "path": "for paths without a cached prompt",
    "invalid": "that an engine would refuse",
}


class LineCauses:
    """Why lines of a log cannot be used: the number of lines for each cause, and of each the first line and its reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._firsts: dict[str, tuple[int, str]] = {}

    def add(self, cause: str, line: int, reason: str) -> None:
        """Count line number `line`. Mutates."""
        self.counts[cause] += 1
        self._firsts.setdefault(cause, (line, reason))
        log.debug("a line of the log is ignored", line=line, cause=cause, reason=reason)

    def lines(self) -> Iterator[str]:
        """Yield a text for each cause, the most frequent first."""
        for cause, count in self.counts.most_common():
            number, reason = self._firsts[cause]
            yield f"{count:,} {_TOLD.get(cause, cause)}; the first is line {number}: {reason}"


class LoggedRequests:
    """The requests of one log. `known` returns whether requests for a model are wanted."""

    def __init__(
        self,
        path: Path,
        reader: RequestReader,
        window_s: float,
        output_tokens: int,
        known: Callable[[str], bool] = lambda _: True,
        every_s: float | None = None,
    ) -> None:
        """`every_s`: interval between the arrivals of lines without a time, s; None: such lines cannot be used."""
        self._path = path
        self._reader = reader
        self._window_s = window_s
        self._output_tokens = output_tokens
        self._known = known
        self._every_s = every_s
        self.causes = LineCauses()
        self.failed = 0

    async def read(self) -> AsyncIterator[ObservedRequest]:
        """Yield the requests but for failed ones, which are counted, in the order of their arrival. Raises TraceError if the file
        cannot be read."""
        window_s = self._window_s
        pending = PendingRequests(window_s, self._output_tokens)
        for number, line in self._lines():
            try:
                request, ended_at = line.request, line.ended_at
                if request is None:
                    raise UnusableRequest("without a prompt", "neither path and body nor model and prompt_token_ids")
                path, body = request
                headers = Headers([("X-Request-ID", line.id or f"line-{number}"), ("X-Session-ID", line.session)])
                asked, _ = await self._reader.read(path, headers, body, line.arrived_at)
                if not self._known(asked.model):
                    raise UnusableRequest("model", f"no engine of model {asked.model!r} is known")
                pending.add(asked, line.end)
            except LineError as error:
                self.causes.add("unreadable lines", number, str(error))
                continue
            except UnusableRequest as error:
                self.causes.add(error.reason, number, str(error))
                continue
            for observed in pending.due(ended_at, ended_at - window_s):
                yield observed
        for observed in pending.due(math.inf, math.inf):
            yield observed
        self.failed = pending.failed

    def _lines(self) -> Iterator[tuple[int, LogLine]]:
        without_time = 0
        for number, raw in lines_of(self._path):
            try:
                line = read_line(raw)
            except LineError as error:
                self.causes.add("unreadable lines", number, str(error))
                continue
            if line.time is None and self._every_s is not None:
                line.time, line.duration_s = without_time * self._every_s, 0.0
                without_time += 1
            yield number, line
