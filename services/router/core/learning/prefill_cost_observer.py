"""When each instance's open prefills began and last moved, and what their ends teach about cost. Pure; times in s on one clock.

An engine computes prompts in the order of their coming, one after another, so the time from the end of one prefill (or from its
own coming, when the instance was idle) to its own first token is what a prefill took. Where that does not hold (it ended out
of order, or the engine cuts long prompts and so mixes them, or an earlier owner placed it) nothing is learned.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from pointsman.router.core.load.reservations import Reservation, Reservations
from pointsman.router.core.prefill_curve import DEFAULT_CURVE, MeanWork, PrefillCurve, PrefillCurveFit, PrefillWork
from pointsman.router.core.types import InstanceInfo

# Ends that come together were computed in one step of the engine: the later ones took no time of their own.
_TOGETHER = 0.2
_LEAST_S = 1e-3


@dataclass(slots=True)
class _Watched:
    """The prefills of one instance, in the order of their coming: since when each is open, and its number. Those whose numbers
    are at most `mixed` teach nothing. `advanced_at`: when the first of them last moved."""

    # No dict: to ask one for its first key takes a step for each key that was removed.
    opened: OrderedDict[str, tuple[float, int]] = field(default_factory=OrderedDict)
    number: int = 0
    mixed: int = 0
    advanced_at: float = 0.0
    freed_at: float = 0.0


class PrefillObserver:
    """Watches open prefills. Keeps a curve for each pool and kind of hardware, and the mean work of each pool.

    A new owner of a pool learns the curves anew: what is decided on them is in multiples of the mean work, so a wrong scale
    cancels out, and the right one is known after a dozen prefills. The mean work it takes over.
    """

    def __init__(self, reservations: Reservations) -> None:
        self._reservations = reservations
        self._watched: dict[str, _Watched] = {}
        self._fits: dict[tuple[str, str], PrefillCurveFit] = {}
        self._means: dict[str, MeanWork] = {}
        self._told: dict[str, MeanWork] = {}

    def curve(self, pool: str, hardware: str) -> PrefillCurve:
        """What prefills cost on such hardware, as far as known."""
        fit = self._fits.get((pool, hardware))
        return fit.curve if fit else DEFAULT_CURVE

    def samples(self, pool: str, hardware: str) -> int:
        """How many prefills the curve was learned from."""
        fit = self._fits.get((pool, hardware))
        return fit.samples if fit else 0

    def mean_work(self, pool: str) -> PrefillWork:
        """The work that a request of the pool brings in the mean."""
        mean_work = self._means.get(pool)
        return mean_work.work if mean_work else PrefillWork()

    def advanced_at(self, instance_id: str) -> float:
        """When the first of an instance's prefills began or was last seen to move on."""
        watched = self._watched.get(instance_id)
        return watched.advanced_at if watched else 0.0

    def mean_work_record(self, pool: str) -> MeanWork | None:
        """What a later owner of the pool should know of its mean work; None where nothing is known."""
        return self._means.get(pool)

    def count_request(self, pool: str, new: int, cached: int) -> MeanWork | None:
        """A request was placed where it has so many new tokens after cached ones; the new mean, where it differs enough from the
        last one. Mutates."""
        mean_work = self._means[pool] = self._means.get(pool, MeanWork()).after(new, cached)
        if not mean_work.differs_from(self._told.get(pool, MeanWork())):
            return None
        self._told[pool] = mean_work
        return mean_work

    def take_over(self, pool: str, mean_work: MeanWork | None) -> None:
        """The pool came from another owner, with what it had kept. Mutates."""
        self._told.pop(pool, None)
        if mean_work is not None:
            self._means[pool] = self._told[pool] = mean_work

    def opened(self, reservation: Reservation, info: InstanceInfo | None, now: float) -> None:
        """A step was reserved. Mutates; O(1)."""
        if not reservation.new_tokens or info is None:  # of an instance that is gone nothing is learned
            return
        watched = self._watched.setdefault(reservation.instance_id, _Watched())
        watched.opened.pop(reservation.request_id, None)
        watched.number += 1
        if not self._has_others(reservation, watched):
            watched.advanced_at = now
        elif info.long_prefill_token_threshold:
            watched.mixed = watched.number
        watched.opened[reservation.request_id] = now, watched.number

    def moved(self, instance_id: str, now: float) -> None:
        """An instance's events tell that a prefill went on. Mutates."""
        if (watched := self._watched.get(instance_id)) is not None:
            watched.advanced_at = now

    def done(self, reservation: Reservation, info: InstanceInfo | None, now: float, *, doubtful: bool) -> None:
        """A prefill ended by its first token, or by its step's end; the reservation is as it was before. `doubtful`: what was
        computed is not what was expected. Mutates; O(1)."""
        watched = self._watched.get(reservation.instance_id)
        if watched is None or reservation.request_id not in watched.opened:
            return
        in_order = self._first(reservation.instance_id, watched) == reservation.request_id
        opened_at, number = watched.opened[reservation.request_id]
        began = max(opened_at, watched.freed_at)
        known = in_order and number > watched.mixed and not doubtful
        self._drop(watched, reservation.request_id, now)
        if not in_order:
            watched.mixed = watched.number
        if known and info is not None:
            self._learn(reservation, info, now - began)

    def gone(self, reservation: Reservation, now: float) -> None:
        """A request ended before its prefill did, or it is over anyway. Mutates."""
        watched = self._watched.get(reservation.instance_id)
        if watched is not None and reservation.request_id in watched.opened:
            self._drop(watched, reservation.request_id, now)

    def forget(self, instance_id: str) -> None:
        """The instance is another one now, or gone. Mutates."""
        self._watched.pop(instance_id, None)

    def forget_pool(self, pool: str) -> None:
        """The pool has been gone for long. Mutates; O(pools and kinds of hardware)."""
        self._fits = {key: fit for key, fit in self._fits.items() if key[0] != pool}
        self._means.pop(pool, None)
        self._told.pop(pool, None)

    def check_invariants(self) -> None:
        """Raise AssertionError when something is watched that is not open."""
        for instance_id, watched in self._watched.items():
            numbers = [number for _, number in watched.opened.values()]
            assert numbers == sorted(numbers), instance_id
            queue = [
                one.request_id
                for one in self._reservations.open_prefills(instance_id)
                if one.pending_tokens > 0 or one.request_id in watched.opened
            ]
            assert [one for one in queue if one in watched.opened] == list(watched.opened), instance_id
            assert self._first(instance_id, watched) == (queue[0] if queue else None), instance_id
            for request_id in watched.opened:
                reservation = self._reservations.get(request_id)
                assert reservation is not None
                assert reservation.instance_id == instance_id, request_id

    def _has_others(self, reservation: Reservation, watched: _Watched) -> bool:
        """Whether the instance has another prefill to compute than this one, which is not among the watched."""
        pending = self._reservations.counters(reservation.instance_id).pending_prefills
        own = self._reservations.get(reservation.request_id)
        return bool(watched.opened) or pending > (own is not None and own.pending_tokens > 0)

    def _first(self, instance_id: str, watched: _Watched) -> str | None:
        """Of the prefills that the instance has to compute the one that came first. What is computed in full, as events tell, and
        not told to be done yet, counts still; between two slices nothing does."""
        pending = self._reservations.first_prefill(instance_id)
        opened = next(iter(watched.opened), None)
        if pending is None or opened is None:
            return opened if pending is None else pending.request_id
        earlier = self._reservations.came_before(instance_id, opened, pending.request_id)
        return opened if earlier else pending.request_id

    def _drop(self, watched: _Watched, request_id: str, now: float) -> None:
        del watched.opened[request_id]
        watched.advanced_at = watched.freed_at = now

    def _learn(self, reservation: Reservation, info: InstanceInfo, seconds: float) -> None:
        new, cached = reservation.new_tokens, reservation.cached_tokens
        fit = self._fits.setdefault((reservation.pool, info.hardware), PrefillCurveFit())
        together = fit.samples >= fit.TRUSTED_AFTER and seconds < _TOGETHER * fit.curve.cost_s(new, cached)
        if seconds >= _LEAST_S and not together:
            fit.learn(new, cached, seconds)
