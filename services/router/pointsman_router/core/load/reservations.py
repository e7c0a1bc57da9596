"""The load that placed requests add to their instances, from the placement until their stream ends. Pure.

These counters are the router's load signal. They are always current, while scraped figures are a second old.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from pointsman_router.core.kv_load import NO_LOAD, KvLoad
from pointsman_router.core.placement_types import LISTED_PREFILLS, Phase
from pointsman_router.core.prefill_curve import NO_PREFILLS, PrefillSums, token_pairs
from pointsman_router.core.turn import Turn


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """The load of one request on one instance."""

    request_id: str  # a request has one reservation at most, that of its current step
    gateway_id: str  # empty: the unary form
    instance_id: str  # where the step runs
    decision_id: str  # of the plan; empty if the request is known by its gateway's announcement only
    input_tokens: int  # tokens of the prompt
    new_tokens: int  # those that the step must compute, the price of `kv_load` included
    step_index: int = 0  # of its step in the plan
    phase: Phase = Phase.PREFILL  # DECODE from the first token on; a PREFILL step ends without one
    lease_until: float | None = None  # when it ends without a report, s; None: no lease runs
    prefilled_tokens: int = 0  # how many of the new tokens are computed, by the instance's events
    pool: str = ""  # of the request's model when it was placed; empty if that was unknown
    cached_tokens: int = 0  # tokens of the prompt before the new ones, which are cached
    kv_load: KvLoad = NO_LOAD  # what the instance loads from lower tiers first
    sequences: int = 1  # as PlacementRequest.sequences
    sequence_tokens: int = 0  # as PlacementRequest.sequence_tokens
    fetching: bool = False  # whether another instance sends the cached tokens: an open prefill with none to compute

    @property
    def decode_tokens(self) -> int:
        """Prompt tokens to which its sequences attend in each step of the decode."""
        return self.sequence_tokens or self.input_tokens

    @property
    def sequence_length(self) -> int:
        """As PlacementRequest.sequence_length."""
        return self.decode_tokens // self.sequences

    @property
    def pending_tokens(self) -> int:
        """New tokens that are not computed yet; 0 after the first token."""
        return self.new_tokens - self.prefilled_tokens if self.phase is Phase.PREFILL else 0

    @property
    def pending_pairs(self) -> int:
        """Pairs of a token that is not computed yet with each token it attends to, each pair counted twice (PrefillWork)."""
        return token_pairs(self.pending_tokens, self.cached_tokens + self.prefilled_tokens, self.sequence_length)

    @property
    def remainder_tokens(self) -> int:
        """Tokens of the prompt after those that this step computes."""
        return self.input_tokens - self.cached_tokens - self.new_tokens

    @property
    def remainder(self) -> tuple[str, int, int]:
        """The remainder as an entry of PrefillBacklog.remainders."""
        return self.request_id, self.remainder_tokens, self.cached_tokens + self.new_tokens


@dataclass(slots=True)
class Counters:
    """The sums over the open requests of one instance (the terms of the policies' formulas, and of the pool's backlog)."""

    num_requests: int = 0  # each sequence of a request counts
    pending_prefill_tokens: int = 0  # not computed yet
    ongoing_decode_tokens: int = 0  # prompt tokens of the sequences in decode
    ongoing_tokens: int = 0  # input tokens of all requests
    pending_prefills: int = 0  # number of requests with tokens that are not computed yet
    pending_pairs: int = 0  # of tokens that are not computed yet (PrefillWork)

    def add(self, reservation: Reservation, sign: int) -> None:
        """Add (sign 1) or subtract (sign -1) a reservation. Mutates."""
        self.num_requests += sign * reservation.sequences
        self.ongoing_tokens += sign * reservation.input_tokens
        if reservation.phase is Phase.DECODE:
            self.ongoing_decode_tokens += sign * reservation.decode_tokens
        else:
            self.add_pending(reservation, sign)

    def add_pending(self, reservation: Reservation, sign: int) -> None:
        """Add or subtract only the pending tokens of a reservation. Mutates."""
        if pending := reservation.pending_tokens:
            self.pending_prefills += sign
            self.pending_prefill_tokens += sign * pending
            self.pending_pairs += sign * reservation.pending_pairs


_NOTHING = Counters()

_Entry = TypeVar("_Entry", tuple[int, int], tuple[str, int, int])


class _Prefills(Generic[_Entry]):
    """Some of an instance's open prefills in order of arrival, as entries of PrefillBacklog, and their sums. An entry is made
    once, so that all views share it until the prefill progresses."""

    __slots__ = ("entries", "pairs", "tokens")

    def __init__(self) -> None:
        # Not a dict: finding its first key takes a step for each key that was removed before.
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.tokens = self.pairs = 0

    def put(self, request_id: str, entry: _Entry) -> None:
        """Add a prefill at the end, or replace its entry in place. Mutates."""
        if (before := self.entries.get(request_id)) is not None:
            self._count(before, -1)
        self.entries[request_id] = entry
        self._count(entry, 1)

    def drop(self, request_id: str) -> None:
        """Remove a prefill, if it is present. Mutates."""
        if (entry := self.entries.pop(request_id, None)) is not None:
            self._count(entry, -1)

    def listed(self, *, last: bool = False) -> tuple[tuple[_Entry, ...], PrefillSums]:
        """Return at most LISTED_PREFILLS entries, the first or the last ones to arrive, and the sums of the others. O(1)."""
        if len(self.entries) <= LISTED_PREFILLS:
            return tuple(self.entries.values()), NO_PREFILLS
        values = self.entries.values()
        some = tuple(islice(reversed(values) if last else values, LISTED_PREFILLS))
        tokens, pairs = self.tokens, self.pairs
        for entry in some:
            tokens -= entry[-2]
            pairs -= _pairs(entry)
        return some[::-1] if last else some, PrefillSums(len(self.entries) - len(some), float(tokens), float(pairs))

    def check_invariants(self) -> None:
        """Raise AssertionError if the sums are not those of the entries."""
        assert self.entries
        assert self.tokens == sum(entry[-2] for entry in self.entries.values())
        assert self.pairs == sum(map(_pairs, self.entries.values()))

    def _count(self, entry: _Entry, sign: int) -> None:
        self.tokens += sign * entry[-2]
        self.pairs += sign * _pairs(entry)


def _pairs(entry: tuple[int, int] | tuple[str, int, int]) -> int:
    return entry[-2] * (2 * entry[-1] + entry[-2])


class Reservations:
    """All open reservations, one per request id, and their sums by instance.

    `touched`: the instances whose sums have changed. `less_busy`: the instances that have less to do. Their readers clear them.
    """

    def __init__(self, turn: Turn | None = None) -> None:
        self._turn = turn if turn is not None else Turn()
        self.touched: set[str] = set()
        self.less_busy: set[str] = set()
        self._open: dict[str, Reservation] = {}
        self._counters: dict[str, Counters] = {}
        self._of_instance: dict[str, dict[str, None]] = {}
        # Instance -> ids of its open prefills in order of arrival, each with its arrival number.
        self._prefilling: dict[str, dict[str, int]] = {}
        self._sequences: dict[str, int] = {}  # instance -> number of sequences of these
        self._came = 0
        # Instance -> its open prefills that have tokens left to compute.
        self._pending: dict[str, _Prefills[tuple[int, int]]] = {}
        # Instance -> its open prefills whose prompts have a remainder that is placed later.
        self._partial: dict[str, _Prefills[tuple[str, int, int]]] = {}
        # Instance with open requests -> when one of its answers began last, s.
        self._answer_began: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._open.values())

    def get(self, request_id: str) -> Reservation | None:
        """Return the open reservation of a request, or None."""
        return self._open.get(request_id)

    def counters(self, instance_id: str) -> Counters:
        """Return the sums of one instance; do not mutate them."""
        return self._counters.get(instance_id, _NOTHING)

    def open_prefills(self, instance_id: str) -> list[Reservation]:
        """Return the open prefills of an instance in order of arrival: reservations that had tokens to compute when they were
        opened, or fetch cached ones, and have no first token yet."""
        return [self._open[request_id] for request_id in self._prefilling.get(instance_id, ())]

    def first_prefill(self, instance_id: str) -> Reservation | None:
        """Return the first open prefill of an instance that has tokens left to compute, or None. O(1)."""
        pending = self._pending.get(instance_id)
        return self._open[next(iter(pending.entries))] if pending else None

    def queue(self, instance_id: str) -> tuple[tuple[tuple[int, int], ...], PrefillSums]:
        """Return `queue` and `unlisted` of the instance's PrefillBacklog. O(1)."""
        pending = self._pending.get(instance_id)
        return pending.listed() if pending else ((), NO_PREFILLS)

    def remainders(self, instance_id: str) -> tuple[tuple[tuple[str, int, int], ...], PrefillSums]:
        """Return `remainders` and `unlisted_remainders` of the instance's PrefillBacklog, for a request without a remainder
        there. O(1)."""
        partial = self._partial.get(instance_id)
        # A prompt gets its turn on an instance only if it has less left than the prompts already there. So the newest matter
        # most.
        return partial.listed(last=True) if partial else ((), NO_PREFILLS)

    def num_prefills(self, instance_id: str) -> int:
        """Return how many sequences the open prefills of an instance have, including those without tokens left to compute."""
        return self._sequences.get(instance_id, 0)

    def came_before(self, instance_id: str, one: str, other: str) -> bool:
        """Return whether request `one` arrived before `other`; both must be open prefills of the instance. O(1)."""
        numbers = self._prefilling[instance_id]
        return numbers[one] < numbers[other]

    def partial_prefill(self, request_id: str) -> Reservation | None:
        """Return the open reservation of a request if it is an open prefill with a remainder, else None."""
        reservation = self._open.get(request_id)
        partial = self._partial.get(reservation.instance_id) if reservation is not None else None
        return reservation if partial is not None and request_id in partial.entries else None

    def partial_prefills(self) -> list[Reservation]:
        """Return the open prefills with a remainder, of all instances."""
        return [self._open[request_id] for partial in self._partial.values() for request_id in partial.entries]

    def prefills(self, instance_id: str) -> bool:
        """Return whether an instance has any open prefill."""
        return instance_id in self._prefilling

    def put(self, reservation: Reservation) -> None:
        """Open a reservation, or replace the one with the same request id. Mutates."""
        self.release(reservation.request_id)
        self._open[reservation.request_id] = reservation
        self._counters.setdefault(reservation.instance_id, Counters()).add(reservation, 1)
        self._of_instance.setdefault(reservation.instance_id, {})[reservation.request_id] = None
        if reservation.pending_tokens > 0 or (reservation.fetching and reservation.phase is Phase.PREFILL):
            self._came += 1
            self._prefilling.setdefault(reservation.instance_id, {})[reservation.request_id] = self._came
            self._count_sequences(reservation, 1)
            if reservation.pending_tokens > 0:
                self._pending.setdefault(reservation.instance_id, _Prefills()).put(
                    reservation.request_id, _left(reservation)
                )
            if reservation.remainder_tokens > 0:
                partial = self._partial.setdefault(reservation.instance_id, _Prefills())
                partial.put(reservation.request_id, reservation.remainder)
        self.touched.add(reservation.instance_id)

    def of_instance(self, instance_id: str) -> list[Reservation]:
        """Return the open reservations of one instance. O(returned reservations)."""
        return [self._open[request_id] for request_id in self._of_instance.get(instance_id, ())]

    def of_pool(self, pool: str) -> list[Reservation]:
        """Return the open reservations of one pool. O(open reservations)."""
        return [reservation for reservation in self._open.values() if reservation.pool == pool]

    def answer_began_at(self, instance_id: str) -> float | UnsetType:
        """Return when one of the instance's answers began last, in s; unset if it has no open request since then."""
        return self._answer_began.get(instance_id, UNSET)

    def first_token(self, request_id: str, now: float) -> Reservation | None:
        """Move a request from prefill to decode and return its reservation; None (no effect) if it is unknown or in decode.
        Mutates."""
        reservation = self._open.get(request_id)
        if reservation is None or reservation.phase is Phase.DECODE:
            return None
        moved = replace(reservation, phase=Phase.DECODE)
        self.put(moved)
        self._answer_began[moved.instance_id] = now
        return moved

    def prefilled(self, request_id: str, tokens: int) -> Reservation | None:
        """Record that the instance has computed `tokens` of a request's new tokens; return the reservation, None if it is not
        open. Mutates."""
        reservation = self._open.get(request_id)
        if reservation is not None and reservation.phase is Phase.PREFILL:
            moved = replace(reservation, prefilled_tokens=min(tokens, reservation.new_tokens))
            self._open[request_id] = moved
            self.touched.add(moved.instance_id)
            self.less_busy.add(moved.instance_id)
            counters = self._counters[moved.instance_id]
            counters.add_pending(reservation, -1)
            counters.add_pending(moved, 1)
            if moved.pending_tokens != reservation.pending_tokens:
                self._follow_pending(moved, before=reservation.pending_tokens)
        return self._open.get(request_id)

    def lease(self, request_id: str, until: float | None) -> Reservation:
        """Set when an open reservation ends unless it is renewed, s; None: no end. Return the reservation. Mutates."""
        leased = self._open[request_id] = replace(self._open[request_id], lease_until=until)
        return leased

    def release(self, request_id: str) -> Reservation | None:
        """End a reservation and return it; None (no effect) if it is not open. Mutates."""
        reservation = self._open.pop(request_id, None)
        if reservation is not None:
            counters = self._counters[reservation.instance_id]
            counters.add(reservation, -1)
            self.touched.add(reservation.instance_id)
            del self._of_instance[reservation.instance_id][request_id]
            self.less_busy.add(reservation.instance_id)
            self._turn.freed[reservation.pool] = None
            if not counters.num_requests:
                del self._counters[reservation.instance_id]
                del self._of_instance[reservation.instance_id]
                self._answer_began.pop(reservation.instance_id, None)
            if (waiting := self._prefilling.get(reservation.instance_id)) is not None:
                if waiting.pop(request_id, None) is not None:
                    self._count_sequences(reservation, -1)
                if not waiting:
                    del self._prefilling[reservation.instance_id]
            _drop(self._pending, reservation)
            _drop(self._partial, reservation)
        return reservation

    def _count_sequences(self, reservation: Reservation, sign: int) -> None:
        left = self._sequences.get(reservation.instance_id, 0) + sign * reservation.sequences
        if left:
            self._sequences[reservation.instance_id] = left
        else:
            del self._sequences[reservation.instance_id]

    def _follow_pending(self, reservation: Reservation, before: int) -> None:
        instance_id, request_id = reservation.instance_id, reservation.request_id
        if not reservation.pending_tokens:
            _drop(self._pending, reservation)
        elif before:
            self._pending[instance_id].put(request_id, _left(reservation))
        elif request_id in self._prefilling.get(instance_id, ()):
            # The prefill has tokens to compute again, which is rare. It keeps its old place in the order.
            pending = self._pending[instance_id] = _Prefills()
            for prefilling in map(self._open.__getitem__, self._prefilling[instance_id]):
                if prefilling.pending_tokens:
                    pending.put(prefilling.request_id, _left(prefilling))

    def expired(self, now: float) -> list[Reservation]:
        """Return the reservations whose lease has ended at `now` (s)."""
        return [
            reservation
            for reservation in self._open.values()
            if reservation.lease_until is not None and reservation.lease_until <= now
        ]

    def check_invariants(self) -> None:
        """Raise AssertionError if the sums are not those of the open reservations."""
        sums: dict[str, Counters] = {}
        for reservation in self._open.values():
            assert 0 <= reservation.prefilled_tokens <= max(reservation.new_tokens, 0)
            sums.setdefault(reservation.instance_id, Counters()).add(reservation, 1)
        assert sums == self._counters, (sums, self._counters)
        assert self._of_instance.keys() == self._counters.keys()
        placed = {request_id: instance for instance, ids in self._of_instance.items() for request_id in ids}
        assert placed == {reservation.request_id: reservation.instance_id for reservation in self._open.values()}
        listed = {(instance, request_id) for instance, ids in self._prefilling.items() for request_id in ids}
        pending = {
            (reservation.instance_id, reservation.request_id)
            for reservation in self._open.values()
            if reservation.pending_tokens > 0
        }
        assert pending <= listed, (pending, listed)
        assert all(self._open[request_id].instance_id == instance for instance, request_id in listed)
        for instance_id, numbers in self._prefilling.items():
            assert list(numbers.values()) == sorted(numbers.values())
            here = [self._open[request_id] for request_id in numbers]
            assert self._sequences[instance_id] == sum(reservation.sequences for reservation in here)
            _check(
                self._pending,
                instance_id,
                {reservation.request_id: _left(reservation) for reservation in here if reservation.pending_tokens > 0},
            )
            _check(
                self._partial,
                instance_id,
                {reservation.request_id: reservation.remainder for reservation in here if reservation.remainder[1] > 0},
            )
        assert self._pending.keys() | self._partial.keys() <= self._prefilling.keys()
        assert self._answer_began.keys() <= self._counters.keys()
        assert self._sequences.keys() == self._prefilling.keys()


def _left(reservation: Reservation) -> tuple[int, int]:
    """Return an open prefill as an entry of PrefillBacklog.queue."""
    return reservation.pending_tokens, reservation.cached_tokens + reservation.prefilled_tokens


def _drop(prefills: dict[str, _Prefills[_Entry]], reservation: Reservation) -> None:
    if (here := prefills.get(reservation.instance_id)) is not None:
        here.drop(reservation.request_id)
        if not here.entries:
            del prefills[reservation.instance_id]


def _check(prefills: dict[str, _Prefills[_Entry]], instance_id: str, expected: dict[str, _Entry]) -> None:
    if (here := prefills.get(instance_id)) is not None:
        here.check_invariants()
    assert list(here.entries.items() if here is not None else ()) == list(expected.items()), instance_id
