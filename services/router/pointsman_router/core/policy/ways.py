"""The ways in which instances can get a prompt's KV: to compute what they lack, or to fetch another one's prefix first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET

from pointsman_common.core.kv_transfer_params import fetch_limit_s
from pointsman_router.core.placement_types import NO_TRANSFERS, Candidate, FleetView, PlacementRequest
from pointsman_router.core.policy.prefills_ahead import prefills_ahead
from pointsman_router.core.prefill_curve import DEFAULT_CURVE, PrefillCurve

# Number of instances with most of the prompt that are considered as sources of a fetch.
SOURCES = 3
# Why an instance gets no requests that can send KV nevertheless; empty: it gets some.
ANSWERING = frozenset(("", "cordoned", "draining", "saturated"))
# Maximum predicted time of a fetch, as a share of the time after which the gateway gives it up.
SURE_SHARE = 0.5


def can_send(candidate: Candidate) -> bool:
    """Return whether an instance can send what it has cached of the prompt, whether it gets requests or not."""
    return bool(candidate.kv_gives and candidate.exact and candidate.excluded in ANSWERING and candidate.present_tokens)


class Way(NamedTuple):
    """How an instance has the whole prompt soonest, its queue aside."""

    seconds: float  # until then
    computes_s: float  # how much of it the instance computes
    new_tokens: int  # that it computes, with the price of loads from its lower tiers in tokens
    # Tokens that it has once another instance's KV has arrived; 0: nothing is fetched.
    prefix_tokens: int = 0
    source: str = ""  # the instance that sends them; empty with `prefix_tokens`: they come for another request already


class _Source(NamedTuple):
    candidate: Candidate
    tokens: int  # that it can send
    waits_s: float  # before it sends


class Ways:
    """The way of each of some candidates. `seconds`: of all, in their order. `fetches`: those that are not mere computing, by
    place in that order.

    A fetch takes, in s: the prefills that a prompt of one new token waits for, at the source and at the candidate, the loads from
    the source's lower tiers, and the pool's price of what it sends to others and of the tokens that the candidate lacks. It is a
    way if it sends `least_tokens` or more, and is surely not given up. KV that is on its way for another request counts from its
    arrival.
    """

    def __init__(
        self, request: PlacementRequest, view: FleetView, candidates: Sequence[Candidate], least_tokens: float
    ) -> None:
        curves, length = view.curves, request.sequence_length
        self._candidates = candidates
        self.seconds = [
            candidate.prefill_s(curves.get(candidate.prefill_backlog.hardware, DEFAULT_CURVE), length)
            for candidate in candidates
        ]
        self.fetches: dict[int, Way] = {}
        sources = _sources(request, view) if view.fetch_price is not UNSET else ()
        # An instance with more cached than this has nothing to fetch.
        most = max([source.tokens for source in sources], default=0) - least_tokens
        for at, candidate in enumerate(candidates):
            if candidate.cached_tokens > most and candidate.transfers is UNSET:
                continue
            curve = curves.get(candidate.prefill_backlog.hardware, DEFAULT_CURVE)
            way = self[at]
            if candidate.cached_tokens <= most:
                way = _with_fetch(way, request, view, candidate, curve, sources, least_tokens)
            if candidate.transfers is not UNSET:
                way = _with_arrival(way, request, candidate, curve)
            if way.prefix_tokens:
                self.fetches[at], self.seconds[at] = way, way.seconds

    def __getitem__(self, at: int) -> Way:
        seconds = self.seconds[at]
        return self.fetches.get(at) or Way(seconds, seconds, self._candidates[at].new_tokens)


def _sources(request: PlacementRequest, view: FleetView) -> Sequence[_Source]:
    """Return the instances that can send most of the prompt, at most SOURCES."""
    able = [candidate for candidate in view.candidates if can_send(candidate)]
    sources = []
    for candidate in sorted(able, key=_by_prefix)[:SOURCES]:
        work = candidate.prefill_backlog
        curve = view.curves.get(work.hardware, DEFAULT_CURVE)
        waits_s = prefills_ahead(work, curve, 1, view.now)[1] + candidate.kv_load.seconds
        sources.append(_Source(candidate, min(candidate.present_tokens, request.sliceable_tokens), waits_s))
    return sources


def _by_prefix(candidate: Candidate) -> tuple[int, int, int]:
    """Return a sort key: most of the prompt first; of equal ones those that send least, and then those that compute least."""
    sending = NO_TRANSFERS if candidate.transfers is UNSET else candidate.transfers
    return -candidate.present_tokens, sending.sending_tokens, candidate.pending_prefill_tokens


def _with_fetch(
    way: Way,
    request: PlacementRequest,
    view: FleetView,
    candidate: Candidate,
    curve: PrefillCurve,
    sources: Sequence[_Source],
    least_tokens: float,
) -> Way:
    """Return `way`, or a fetch if that is sooner."""
    price = view.fetch_price
    assert price is not UNSET
    work = candidate.prefill_backlog
    block, present, length = work.block_size, candidate.present_tokens, request.input_tokens
    # The KV has a place there once the engine takes the request up, which has one token to compute, as at the source.
    waits_s = prefills_ahead(work, curve, 1, view.now)[1]
    for source in sources:
        # The engine computes the token after the prefix itself.
        prefix = min(source.tokens, length - 1) // block * block
        if prefix - present < least_tokens:
            break
        transfers = source.candidate.transfers
        sending = NO_TRANSFERS if transfers is UNSET else transfers
        fetch_s = source.waits_s + waits_s + price.seconds(prefix - candidate.device_tokens + sending.sending_tokens)
        if fetch_s >= min(way.seconds, SURE_SHARE * fetch_limit_s(prefix)):
            continue
        computes_s = curve.cost_s(length - prefix, prefix)
        if fetch_s + computes_s < way.seconds and source.candidate.can_give_kv_to(candidate):
            way = Way(fetch_s + computes_s, computes_s, length - prefix, prefix, source.candidate.instance_id)
    return way


def _with_arrival(way: Way, request: PlacementRequest, candidate: Candidate, curve: PrefillCurve) -> Way:
    """Return `way`, or the wait for KV that is on its way to the candidate if that is sooner."""
    transfers = candidate.transfers
    assert transfers is not UNSET
    arriving = min(transfers.arriving_tokens, request.input_tokens - 1)
    if arriving <= candidate.present_tokens:
        return way
    computes_s = curve.cost_s(request.input_tokens - arriving, arriving)
    seconds = transfers.arrives_s + computes_s
    if seconds >= way.seconds:
        return way
    return Way(seconds, computes_s, request.input_tokens - arriving, prefix_tokens=arriving)
