"""Estimates what a router would have done with requests that another one placed: two modelled fleets that differ only in
placement. Pure.

Both fleets get the same requests at the same times. In the recorded fleet each request goes where it really went. In the
counterfactual fleet the policy places it. The policy sees only the state that its own placements produced: caches, loads and
sessions. The difference between the fleets is the effect of placement alone, under one model. Where the engines reported their
cached tokens, these show how accurate the model is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.run_summary import percentiles
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.online_simulator import OnDecision, OnlineSimulator
from pointsman_lab.workload.traces import TraceRequest

# Number of requests, the newest, whose TTFT distribution is reported.
KEPT_TTFTS = 100_000


class ObservedRequest(TraceRequest, frozen=True, kw_only=True):
    """A request that another router placed: a line of a trace with additional fields. Its blocks are named by the router's keys
    of 16 tokens. `timestamp_ms` is the unix time of its arrival.

    `instance` is where it was sent; empty if unknown. `cached_tokens` is what the engine reported for it. `keyed`: its blocks'
    names are keys of its tokens; otherwise the tokens are unknown, and the names are unique to the request. `output_known`:
    output_length was reported, not assumed.
    """

    request_id: str  # its X-Request-ID header, or else an id that its observer gave it
    model: str  # of the pool that serves it
    instance: str = ""
    cached_tokens: int | None = None
    keyed: bool = True
    output_known: bool = True


@dataclass(frozen=True)
class RequestPair:
    """A request with its records in the `recorded` fleet and in the `counterfactual` fleet, which the policy places."""

    request: ObservedRequest
    recorded: RequestRecord
    counterfactual: RequestRecord


class PairedFleets:
    """The two fleets of one model. Requests must be submitted in the order of their arrival."""

    def __init__(self, simulation: SimulationConfig, assumed: str, on_decision: OnDecision | None = None) -> None:
        """`simulation` has the instances' names and the policy. In the recorded fleet, the policy `assumed` places requests whose
        instance is unknown. `on_decision` receives the decisions of the counterfactual fleet's router. Raises SettingError."""
        self.names = simulation.names
        self._recorded = OnlineSimulator(replace(simulation, policy=assumed, policy_settings={}))
        self._counterfactual = OnlineSimulator(simulation, on_decision)
        self._requests: dict[tuple[str, int], ObservedRequest] = {}
        self._ended: dict[tuple[str, int], dict[str, RequestRecord]] = {}
        self._begin_ms: float | None = None
        self._now = 0.0

    @property
    def open(self) -> int:
        """Number of requests that have not ended in both fleets."""
        return len(self._requests)

    def submit(self, request: ObservedRequest) -> list[RequestPair]:
        """Submit the next request; return the requests that ended in both fleets before its arrival. Mutates."""
        if self._begin_ms is None:
            self._begin_ms = request.timestamp_ms
        # A request that was observed too late arrives now.
        self._now = max(self._now, (request.timestamp_ms - self._begin_ms) / 1e3)
        ended = self._note(self._recorded.advance(self._now), self._counterfactual.advance(self._now))
        self._requests[request.session, request.turn] = request
        elsewhere = tuple(name for name in self.names if name != request.instance)
        self._recorded.submit(request, self._now, elsewhere if request.instance in self.names else ())
        self._counterfactual.submit(request, self._now)
        return ended

    def finish(self) -> list[RequestPair]:
        """Run until all requests have ended; return those that had not been returned. Mutates."""
        return self._note(self._recorded.finish(), self._counterfactual.finish())

    def _note(self, recorded: Sequence[RequestRecord], counterfactual: Sequence[RequestRecord]) -> list[RequestPair]:
        both = []
        for kind, records in (("recorded", recorded), ("counterfactual", counterfactual)):
            for record in records:
                key = record.session, record.turn
                found = self._ended.setdefault(key, {})
                found[kind] = record
                if len(found) == 2:
                    del self._ended[key]
                    both.append(RequestPair(self._requests.pop(key), **found))
        return both


@dataclass
class _Side:
    """One of the two fleets: cached tokens, TTFTs (s), and requests and cached tokens by instance."""

    cached_tokens: int = 0
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TTFTS))
    requests: Counter[str] = field(default_factory=Counter)
    cached: Counter[str] = field(default_factory=Counter)

    def add(self, record: RequestRecord) -> None:
        """Count a request that both fleets answered. Mutates."""
        cached = record.cached_tokens or 0
        self.cached_tokens += cached
        self.ttft_s.append(record.ttft_s or 0.0)
        self.requests[record.instance] += 1
        self.cached[record.instance] += cached


@dataclass
class PlacementTotals:
    """Totals of all compared requests. All counts but `requests` and `failed` are of requests that both fleets answered."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0  # input_length of the trace, summed
    # Number of requests whose instance is known.
    placed: int = 0
    # Number of those that the counterfactual fleet placed on the same instance.
    same: int = 0
    # Number of requests whose block names are keys of their tokens.
    keyed: int = 0
    # Number of requests whose output length was reported.
    output_known: int = 0
    recorded: _Side = field(default_factory=_Side)  # the fleet in which requests go where they really went
    counterfactual: _Side = field(default_factory=_Side)  # the fleet in which the policy places them
    # Requests whose instance is known and whose engine reported cached tokens: their tokens by engine and by model.
    reported_requests: int = 0
    reported_prompt_tokens: int = 0  # input_length, summed
    reported_cached_tokens: int = 0  # as the engines reported them
    modelled_cached_tokens: int = 0  # of the same requests in the recorded fleet's model

    def add(self, pair: RequestPair) -> None:
        """Count a pair. Mutates."""
        self.requests += 1
        if not (pair.recorded.ok and pair.counterfactual.ok):
            self.failed += 1
            return
        request = pair.request
        self.prompt_tokens += request.input_length
        self.keyed += request.keyed
        self.output_known += request.output_known
        self.placed += bool(request.instance)
        self.same += request.instance == pair.counterfactual.instance
        self.recorded.add(pair.recorded)
        self.counterfactual.add(pair.counterfactual)
        if request.cached_tokens is not None and request.instance == pair.recorded.instance:
            self.reported_requests += 1
            self.reported_prompt_tokens += request.input_length
            self.reported_cached_tokens += request.cached_tokens
            self.modelled_cached_tokens += pair.recorded.cached_tokens or 0

    def summary(self) -> dict[str, Any]:
        """Return all totals as JSON; ratios are of prompt tokens, None if there are none."""
        return {
            "requests": self.requests,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "placement_known": self.placed,
            "same_instance": self.same,
            "keyed": self.keyed,
            "output_known": self.output_known,
            "recorded": self._side(self.recorded),
            "counterfactual": self._side(self.counterfactual),
            "saved_tokens": self.counterfactual.cached_tokens - self.recorded.cached_tokens,
            "engine_reported": {
                "requests": self.reported_requests,
                "cached_tokens": self.reported_cached_tokens,
                "modelled_tokens": self.modelled_cached_tokens,
                "hit_ratio": _share(self.reported_cached_tokens, self.reported_prompt_tokens),
                "modelled_hit_ratio": _share(self.modelled_cached_tokens, self.reported_prompt_tokens),
            },
        }

    def _side(self, side: _Side) -> dict[str, Any]:
        return {
            "cached_tokens": side.cached_tokens,
            "hit_ratio": _share(side.cached_tokens, self.prompt_tokens),
            "ttft_s": percentiles(side.ttft_s),
            "instances": {
                name: {"requests": side.requests[name], "cached_tokens": side.cached[name]}
                for name in sorted(side.requests)
            },
        }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None
