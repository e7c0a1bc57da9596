"""Holds requests in the order of their arrival until it is known how each ended."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pointsman.common.core.block_keys import KEY_TOKENS
from pointsman.lab.simulation.counterfactual import ObservedRequest

# So many ends wait for their requests, the newest.
MAX_EARLY_ENDS = 10_000


@dataclass(frozen=True)
class ArrivedRequest:
    """A request as it came: `at` in unix s; `keys` of its prompt's full blocks, empty where nobody can tell them;
    `max_output_tokens` 0 when open."""

    request_id: str
    at: float
    model: str
    session: str
    input_tokens: int
    keys: tuple[int, ...]
    max_output_tokens: int = 0


@dataclass(frozen=True)
class RequestOutcome:
    """How a request ended, as far as it is told; `instance` empty and tokens None where it is not. A status of 0 is unknown."""

    status: int = 0
    instance: str = ""
    output_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def failed(self) -> bool:
        """Whether no engine answered it."""
        return self.status >= 400


@dataclass(order=True)
class _Entry:
    at: float
    number: int
    asked: ArrivedRequest = field(compare=False)
    ended: RequestOutcome | None = field(compare=False, default=None)


class PendingRequests:
    """Waits for the ends of requests for up to `window_s`, and gives them out in the order of their arrival.

    `output_tokens` is assumed of answers whose length is not told.
    """

    def __init__(self, window_s: float, output_tokens: int) -> None:
        self._window_s = window_s
        self._output_tokens = output_tokens
        self._entries: list[_Entry] = []
        self._open: dict[str, _Entry] = {}
        # Ends of requests that are not known yet: a log may be ahead of a mirror.
        self._early: OrderedDict[str, RequestOutcome] = OrderedDict()
        self._number = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, asked: ArrivedRequest, ended: RequestOutcome | None = None) -> None:
        """A request came; `ended` when its end is known or never will be. Mutates."""
        self._number += 1
        ended = ended or self._early.pop(asked.request_id, None)
        entry = _Entry(asked.at, self._number, asked, ended)
        heapq.heappush(self._entries, entry)
        if ended is None:
            self._open[asked.request_id] = entry

    def end(self, request_id: str, ended: RequestOutcome, *, follows: bool = False) -> bool:
        """A request ended; False when none of that name is open. `follows`: it may still come. Mutates."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            entry.ended = ended
        elif follows:
            self._early[request_id] = ended
            if len(self._early) > MAX_EARLY_ENDS:
                self._early.popitem(last=False)
        return entry is not None

    def due(self, now: float, complete_until: float) -> Iterator[ObservedRequest]:
        """What can be told in order: all arrivals up to `complete_until` are known, both in unix s. Those that failed are
        counted only. Mutates."""
        while self._entries:
            first = self._entries[0]
            overdue = first.at <= now - self._window_s
            if not overdue and (first.ended is None or first.at > complete_until):
                return
            heapq.heappop(self._entries)
            self._open.pop(first.asked.request_id, None)
            ended = first.ended or RequestOutcome()
            if ended.failed:
                self.failed += 1
            else:
                yield self._observed(first, ended)

    def _observed(self, entry: _Entry, ended: RequestOutcome) -> ObservedRequest:
        asked = entry.asked
        output = ended.output_tokens
        if output is None:
            output = min(self._output_tokens, asked.max_output_tokens or self._output_tokens)
        return ObservedRequest(
            timestamp_ms=asked.at * 1e3,
            session_id=asked.session,
            turn=entry.number,
            input_length=asked.input_tokens,
            output_length=max(output, 1),
            hash_ids=self._blocks(entry),
            block_size=KEY_TOKENS,
            request_id=asked.request_id,
            model=asked.model,
            instance=ended.instance,
            cached_tokens=ended.cached_tokens,
            keyed=bool(asked.keys),
            output_known=ended.output_tokens is not None,
        )

    @staticmethod
    def _blocks(entry: _Entry) -> tuple[int, ...]:
        """The prompt's keys; what has none (behind an image, of an unknown tokenizer) has names that nothing else has."""
        keys = entry.asked.keys
        missing = entry.asked.input_tokens // KEY_TOKENS - len(keys)
        return (*keys, *(-(entry.number << 20) - place for place in range(missing)))
