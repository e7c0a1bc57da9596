"""What a router would have made of requests that another one placed: two modelled fleets, alike but for placement. Pure.

Both are given the same requests at the same moments. In one each request goes where it really went, in the other where the
policy wants it, which sees only what its own placements left in its own fleet: its caches, its loads, its sessions. The
difference between the two is what placement alone makes, under one model; how true the model is shows where the engines
themselves said how many tokens were cached.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pointsman.lab.report.request_record import RequestRecord
from pointsman.lab.report.run_summary import percentiles
from pointsman.lab.simulation.config import SimulationConfig
from pointsman.lab.simulation.online_simulator import OnDecision, OnlineSimulator
from pointsman.lab.workload.traces import TraceRequest

# Of so many requests, the newest, the distribution of TTFT is told.
KEPT_TTFTS = 100_000


class ObservedRequest(TraceRequest, frozen=True, kw_only=True):
    """A request that another router placed: a line of a trace, its blocks named by the router's keys of 16 tokens, and what is
    known besides. `timestamp_ms` is unix time of its arrival.

    `instance` is where it was sent, empty when unknown; `cached_tokens` what the engine said of it. `keyed`: its blocks' names
    are keys of its tokens; else nobody could tell them, and they are names of its own. `output_known`: output_length was told,
    not assumed.
    """

    request_id: str
    model: str
    instance: str = ""
    cached_tokens: int | None = None
    keyed: bool = True
    output_known: bool = True


@dataclass(frozen=True)
class RequestPair:
    """A request, and what became of it in the fleet that places `recorded` and in the one under the policy, `counterfactual`."""

    request: ObservedRequest
    recorded: RequestRecord
    counterfactual: RequestRecord


class PairedFleets:
    """The two fleets of one model. Requests are told in the order of their arrival."""

    def __init__(self, simulation: SimulationConfig, assumed: str, on_decision: OnDecision | None = None) -> None:
        """`simulation` has the instances' names and the policy; a request of which nobody knows where it went is placed by the
        policy `assumed` in the fleet as recorded. `on_decision` hears of the counterfactual fleet's router. Raises
        SettingError."""
        self.names = simulation.names
        self._recorded = OnlineSimulator(replace(simulation, policy=assumed, policy_settings={}))
        self._counterfactual = OnlineSimulator(simulation, on_decision)
        self._requests: dict[tuple[str, int], ObservedRequest] = {}
        self._ended: dict[tuple[str, int], dict[str, RequestRecord]] = {}
        self._begin_ms: float | None = None
        self._now = 0.0

    @property
    def open(self) -> int:
        """How many requests have not ended in both fleets."""
        return len(self._requests)

    def submit(self, request: ObservedRequest) -> list[RequestPair]:
        """The next request; what has ended in both fleets before it came. Mutates."""
        if self._begin_ms is None:
            self._begin_ms = request.timestamp_ms
        # One that was noted too late comes now.
        self._now = max(self._now, (request.timestamp_ms - self._begin_ms) / 1e3)
        ended = self._note(self._recorded.advance(self._now), self._counterfactual.advance(self._now))
        self._requests[request.session, request.turn] = request
        elsewhere = tuple(name for name in self.names if name != request.instance)
        self._recorded.submit(request, self._now, elsewhere if request.instance in self.names else ())
        self._counterfactual.submit(request, self._now)
        return ended

    def finish(self) -> list[RequestPair]:
        """Let all requests end. Mutates."""
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
    """One of the two fleets: tokens found cached, first tokens' times (s), and requests and cached tokens by instance."""

    cached_tokens: int = 0
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TTFTS))
    requests: Counter[str] = field(default_factory=Counter)
    cached: Counter[str] = field(default_factory=Counter)

    def add(self, record: RequestRecord) -> None:
        """Count a request that was answered. Mutates."""
        cached = record.cached_tokens or 0
        self.cached_tokens += cached
        self.ttft_s.append(record.ttft_s or 0.0)
        self.requests[record.instance] += 1
        self.cached[record.instance] += cached


@dataclass
class PlacementTotals:
    """What all compared requests come to. Shares of tokens are of requests that both fleets answered."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    # Requests of which it is known where they went, and that the counterfactual fleet placed on the same instance; with keys;
    # with a known output.
    placed: int = 0
    same: int = 0
    keyed: int = 0
    output_known: int = 0
    recorded: _Side = field(default_factory=_Side)
    counterfactual: _Side = field(default_factory=_Side)
    # Of requests that went where is known and whose engine said what was cached: tokens by engine and by the model.
    reported_requests: int = 0
    reported_prompt_tokens: int = 0
    reported_cached_tokens: int = 0
    modelled_cached_tokens: int = 0

    def add(self, one: RequestPair) -> None:
        """Count a request. Mutates."""
        self.requests += 1
        if not (one.recorded.ok and one.counterfactual.ok):
            self.failed += 1
            return
        request = one.request
        self.prompt_tokens += request.input_length
        self.keyed += request.keyed
        self.output_known += request.output_known
        self.placed += bool(request.instance)
        self.same += request.instance == one.counterfactual.instance
        self.recorded.add(one.recorded)
        self.counterfactual.add(one.counterfactual)
        if request.cached_tokens is not None and request.instance == one.recorded.instance:
            self.reported_requests += 1
            self.reported_prompt_tokens += request.input_length
            self.reported_cached_tokens += request.cached_tokens
            self.modelled_cached_tokens += one.recorded.cached_tokens or 0

    def summary(self) -> dict[str, Any]:
        """Everything as JSON; ratios are of prompt tokens, None where there are none."""
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
