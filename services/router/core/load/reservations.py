"""The load that placed requests add, from the pick until their stream ends. Pure.

These counters are the router's load signal: scraped figures are a second old, these are not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from pointsman.router.core.types import Phase


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """One request's claim on one instance. Tokens: `input_tokens` of the prompt, `new_tokens` of it not cached there,
    `prefilled_tokens` of these computed meanwhile as far as the instance's events tell, `cached_tokens` before them."""

    request_id: str
    gateway_id: str
    instance_id: str
    decision_id: str
    input_tokens: int
    new_tokens: int
    step_index: int = 0
    phase: Phase = Phase.PREFILL
    lease_until: float | None = None
    prefilled_tokens: int = 0
    pool: str = ""
    cached_tokens: int = 0

    @property
    def pending_tokens(self) -> int:
        """Tokens not computed yet."""
        return self.new_tokens - self.prefilled_tokens if self.phase is Phase.PREFILL else 0

    @property
    def pending_pairs(self) -> int:
        """Pairs of a token that is not computed yet with each one that it looks back at, each counted twice (PrefillWork)."""
        pending = self.pending_tokens
        return pending * (2 * (self.cached_tokens + self.prefilled_tokens) + pending)

    @property
    def remainder_tokens(self) -> int:
        """Tokens of the prompt behind those that this step computes."""
        return self.input_tokens - self.cached_tokens - self.new_tokens


@dataclass(slots=True)
class Counters:
    """What the open requests of one instance add up to (the terms of the policies' formulas, and of the pool's backlog).
    `pending_prefills` of them have tokens that are not computed yet."""

    num_requests: int = 0
    pending_prefill_tokens: int = 0
    ongoing_decode_tokens: int = 0
    ongoing_tokens: int = 0
    pending_prefills: int = 0
    pending_pairs: int = 0

    def add(self, reservation: Reservation, sign: int) -> None:
        """Count a reservation in (sign 1) or out (sign -1). Mutates."""
        self.num_requests += sign
        self.ongoing_tokens += sign * reservation.input_tokens
        if reservation.phase is Phase.DECODE:
            self.ongoing_decode_tokens += sign * reservation.input_tokens
        else:
            self.add_pending(reservation, sign)

    def add_pending(self, reservation: Reservation, sign: int) -> None:
        """The same of what a reservation has to compute alone. Mutates."""
        if pending := reservation.pending_tokens:
            self.pending_prefills += sign
            self.pending_prefill_tokens += sign * pending
            self.pending_pairs += sign * reservation.pending_pairs


_NOTHING = Counters()


class Reservations:
    """All open reservations, one for each request id, and their sums by instance. `touched` names the instances whose sums
    have changed since whoever reads them last cleared it, and `eased` those that have less to do."""

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self.eased: set[str] = set()
        self._open: dict[str, Reservation] = {}
        self._counters: dict[str, Counters] = {}
        # Instance -> the ids of its open prefills, in the order of their coming, each with a number that grows with it.
        self._prefilling: dict[str, dict[str, int]] = {}
        self._came = 0
        # Those of them that have tokens left to compute. To ask a dict for its first key takes a step for each that was removed.
        self._pending: dict[str, OrderedDict[str, None]] = {}
        # Those of them whose prompts have a remainder that is to be placed later.
        self._partial: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._open.values())

    def get(self, request_id: str) -> Reservation | None:
        """The open reservation of a request."""
        return self._open.get(request_id)

    def counters(self, instance_id: str) -> Counters:
        """The sums of one instance; do not mutate them."""
        return self._counters.get(instance_id, _NOTHING)

    def open_prefills(self, instance_id: str) -> list[Reservation]:
        """The open reservations of an instance that came with something to compute and have no token yet, in the order of their
        coming."""
        return [self._open[request_id] for request_id in self._prefilling.get(instance_id, ())]

    def first_prefill(self, instance_id: str) -> Reservation | None:
        """The first of them that has tokens left to compute. O(1)."""
        pending = self._pending.get(instance_id)
        return self._open[next(iter(pending))] if pending else None

    def came_before(self, instance_id: str, one: str, other: str) -> bool:
        """Of two of them, by their ids, whether `one` came before the `other`. O(1)."""
        numbers = self._prefilling[instance_id]
        return numbers[one] < numbers[other]

    def partial_prefills(self) -> list[Reservation]:
        """Those of all instances of whose prompts a part is to be placed later."""
        return [self._open[request_id] for request_id in self._partial]

    def prefills(self, instance_id: str) -> bool:
        """Whether an instance has any of them."""
        return instance_id in self._prefilling

    def put(self, reservation: Reservation) -> None:
        """Open a reservation, or replace the one with the same request id. Mutates."""
        self.release(reservation.request_id)
        self._open[reservation.request_id] = reservation
        self._counters.setdefault(reservation.instance_id, Counters()).add(reservation, 1)
        if reservation.pending_tokens > 0:
            self._came += 1
            self._prefilling.setdefault(reservation.instance_id, {})[reservation.request_id] = self._came
            self._pending.setdefault(reservation.instance_id, OrderedDict())[reservation.request_id] = None
            if reservation.remainder_tokens > 0:
                self._partial.add(reservation.request_id)
        self.touched.add(reservation.instance_id)

    def of_pool(self, pool: str) -> list[Reservation]:
        """The open reservations of one pool."""
        return [one for one in self._open.values() if one.pool == pool]

    def first_token(self, request_id: str) -> Reservation | None:
        """Move a request from prefill to decode; None (no effect) when unknown or already there. Mutates."""
        reservation = self._open.get(request_id)
        if reservation is None or reservation.phase is Phase.DECODE:
            return None
        moved = replace(reservation, phase=Phase.DECODE)
        self.put(moved)
        return moved

    def prefilled(self, request_id: str, tokens: int) -> None:
        """The instance has computed `tokens` of a request's new tokens. Mutates."""
        reservation = self._open.get(request_id)
        if reservation is not None and reservation.phase is Phase.PREFILL:
            moved = replace(reservation, prefilled_tokens=min(tokens, reservation.new_tokens))
            self._open[request_id] = moved
            self.touched.add(moved.instance_id)
            self.eased.add(moved.instance_id)
            counters = self._counters[moved.instance_id]
            counters.add_pending(reservation, -1)
            counters.add_pending(moved, 1)
            if bool(moved.pending_tokens) is not bool(reservation.pending_tokens):
                self._follow_pending(moved)

    def keep(self, request_id: str) -> None:
        """Let a reservation, if it is open, live until it is released. Mutates."""
        if (reservation := self._open.get(request_id)) is not None:
            self._open[request_id] = replace(reservation, lease_until=None)

    def lease(self, gateway_id: str, until: float | None) -> None:
        """Let all reservations of a gateway end at `until` (s) unless renewed; None: no end. Mutates."""
        for reservation in list(self._open.values()):
            if reservation.gateway_id == gateway_id:
                self._open[reservation.request_id] = replace(reservation, lease_until=until)

    def release(self, request_id: str) -> Reservation | None:
        """End a reservation; None (no effect) when it is not open. Mutates."""
        reservation = self._open.pop(request_id, None)
        if reservation is not None:
            counters = self._counters[reservation.instance_id]
            counters.add(reservation, -1)
            self.touched.add(reservation.instance_id)
            self.eased.add(reservation.instance_id)
            self._partial.discard(request_id)
            if not counters.num_requests:
                del self._counters[reservation.instance_id]
            if (waiting := self._prefilling.get(reservation.instance_id)) is not None:
                waiting.pop(request_id, None)
                if not waiting:
                    del self._prefilling[reservation.instance_id]
            self._drop_pending(reservation)
        return reservation

    def _drop_pending(self, reservation: Reservation) -> None:
        if (pending := self._pending.get(reservation.instance_id)) is not None:
            pending.pop(reservation.request_id, None)
            if not pending:
                del self._pending[reservation.instance_id]

    def _follow_pending(self, reservation: Reservation) -> None:
        instance_id = reservation.instance_id
        if not reservation.pending_tokens:
            self._drop_pending(reservation)
        elif reservation.request_id in self._prefilling.get(instance_id, ()):
            # It has tokens to compute again, which hardly happens: at its old place.
            ids = [one for one in self._prefilling[instance_id] if self._open[one].pending_tokens]
            self._pending[instance_id] = OrderedDict.fromkeys(ids)

    def expired(self, now: float) -> list[Reservation]:
        """Reservations whose lease is over at `now` (s)."""
        return [one for one in self._open.values() if one.lease_until is not None and one.lease_until <= now]

    def check_invariants(self) -> None:
        """Raise AssertionError when the sums are not those of the open reservations."""
        sums: dict[str, Counters] = {}
        for reservation in self._open.values():
            assert 0 <= reservation.prefilled_tokens <= max(reservation.new_tokens, 0)
            sums.setdefault(reservation.instance_id, Counters()).add(reservation, 1)
        assert sums == self._counters, (sums, self._counters)
        listed = {(instance, one) for instance, ids in self._prefilling.items() for one in ids}
        pending = {(one.instance_id, one.request_id) for one in self._open.values() if one.pending_tokens > 0}
        assert pending <= listed, (pending, listed)
        assert all(self._open[request_id].instance_id == instance for instance, request_id in listed)
        for instance_id, numbers in self._prefilling.items():
            assert list(numbers.values()) == sorted(numbers.values())
            ids = [one for one in numbers if self._open[one].pending_tokens > 0]
            assert list(self._pending.get(instance_id, ())) == ids
        assert self._pending.keys() <= self._prefilling.keys()
        assert all(self._pending.values())
        assert self._partial == {one for _, one in listed if self._open[one].remainder_tokens > 0}
