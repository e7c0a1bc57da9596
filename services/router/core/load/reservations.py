"""The load that placed requests add, from the pick until their stream ends. Pure.

These counters are the router's load signal: scraped figures are a second old, these are not.
"""

from __future__ import annotations

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


@dataclass(slots=True)
class Counters:
    """What the open requests of one instance add up to (the terms of the policies' formulas)."""

    num_requests: int = 0
    pending_prefill_tokens: int = 0
    ongoing_decode_tokens: int = 0
    ongoing_tokens: int = 0

    def add(self, reservation: Reservation, sign: int) -> None:
        """Count a reservation in (sign 1) or out (sign -1). Mutates."""
        self.num_requests += sign
        self.ongoing_tokens += sign * reservation.input_tokens
        self.pending_prefill_tokens += sign * reservation.pending_tokens
        if reservation.phase is Phase.DECODE:
            self.ongoing_decode_tokens += sign * reservation.input_tokens


_NOTHING = Counters()


class Reservations:
    """All open reservations, one for each request id, and their sums by instance. `touched` names the instances whose sums
    have changed since whoever reads them last cleared it."""

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self._open: dict[str, Reservation] = {}
        self._counters: dict[str, Counters] = {}
        # Instance -> the ids of its open prefills, in the order of their coming.
        self._prefilling: dict[str, dict[str, None]] = {}

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

    def prefills(self, instance_id: str) -> bool:
        """Whether an instance has any of them."""
        return instance_id in self._prefilling

    def put(self, reservation: Reservation) -> None:
        """Open a reservation, or replace the one with the same request id. Mutates."""
        self.release(reservation.request_id)
        self._open[reservation.request_id] = reservation
        self._counters.setdefault(reservation.instance_id, Counters()).add(reservation, 1)
        if reservation.pending_tokens > 0:
            self._prefilling.setdefault(reservation.instance_id, {})[reservation.request_id] = None
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
            self._counters[moved.instance_id].pending_prefill_tokens += (
                moved.pending_tokens - reservation.pending_tokens
            )

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
            if not counters.num_requests:
                del self._counters[reservation.instance_id]
            if (waiting := self._prefilling.get(reservation.instance_id)) is not None:
                waiting.pop(request_id, None)
                if not waiting:
                    del self._prefilling[reservation.instance_id]
        return reservation

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
