"""Keeps requests in the order of their arrival until their outcomes are known."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_lab.simulation.counterfactual import ObservedRequest

# Maximum number of outcomes kept for requests that have not arrived yet; the oldest are dropped.
MAX_EARLY_ENDS = 10_000


@dataclass(frozen=True)
class ArrivedRequest:
    """A request as received."""

    request_id: str  # the request's X-Request-ID; a random one if it has none
    at: float  # its arrival, unix s
    model: str  # its pool's model, also where the request names an alias or an adapter
    session: str  # as a gateway derives it: the client's name, or that of requests with the same prefix
    input_tokens: int  # that an engine with an empty cache computes; estimated if the prompt cannot be tokenised
    keys: tuple[int, ...]  # of its prompt's full blocks; empty if they cannot be computed
    max_output_tokens: int = 0  # 0: no limit


@dataclass(frozen=True)
class RequestOutcome:
    """How a request ended. Unknown values: `status` 0, `instance` empty, tokens None."""

    status: int = 0
    instance: str = ""
    output_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the request failed: a status of 400 or more."""
        return self.status >= 400


@dataclass(order=True)
class _Entry:
    at: float
    number: int
    asked: ArrivedRequest = field(compare=False)
    ended: RequestOutcome | None = field(compare=False, default=None)


class PendingRequests:
    """Keeps requests until their outcomes are known, for at most `window_s`, and returns them in the order of their arrival.

    `output_tokens` is the assumed length of an answer whose length is unknown.
    """

    def __init__(self, window_s: float, output_tokens: int) -> None:
        self._window_s = window_s
        self._output_tokens = output_tokens
        self._entries: list[_Entry] = []
        self._open: dict[str, _Entry] = {}
        # Outcomes of requests that have not arrived yet: an access log can be ahead of the mirrored requests.
        self._early: OrderedDict[str, RequestOutcome] = OrderedDict()
        self._number = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, asked: ArrivedRequest, ended: RequestOutcome | None = None) -> None:
        """Add a request. `ended` is its outcome, if it is known or will never be known. Mutates."""
        self._number += 1
        ended = ended or self._early.pop(asked.request_id, None)
        entry = _Entry(asked.at, self._number, asked, ended)
        heapq.heappush(self._entries, entry)
        if ended is None:
            self._open[asked.request_id] = entry

    def end(self, request_id: str, ended: RequestOutcome, *, follows: bool = False) -> bool:
        """Record a request's outcome. Return False if no request with this id is open. `follows`: the request may still arrive,
        so the outcome is kept. Mutates."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            entry.ended = ended
        elif follows:
            self._early[request_id] = ended
            if len(self._early) > MAX_EARLY_ENDS:
                self._early.popitem(last=False)
        return entry is not None

    def due(self, now: float, complete_until: float) -> Iterator[ObservedRequest]:
        """Remove and yield the requests that can be returned in order, except failed ones, which are only counted.

        `now` and `complete_until` are in unix s; all arrivals up to `complete_until` are known. A request whose outcome is still
        unknown after `window_s` is returned without it. Mutates."""
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
        """Return the prompt's keys, then a unique negative name for each full block without a key (after an image, or without a
        known tokenizer)."""
        keys = entry.asked.keys
        missing = entry.asked.input_tokens // KEY_TOKENS - len(keys)
        return (*keys, *(-(entry.number << 20) - place for place in range(missing)))
