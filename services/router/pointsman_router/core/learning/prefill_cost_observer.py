"""Observes open prefills: when they began and last progressed, and what they cost. Pure; times in s on one clock.

An engine that reports its steps says itself how many tokens it computed in which time. For other engines only the ends of
prefills are known. An engine computes prompts one after another in order of arrival. So a prefill took the time from the end of
the previous one, or from its own arrival if the instance was idle, to its own first token. Nothing is learned from a prefill for
which this may not hold: it ended out of order, the engine cuts long prompts and so mixes them, an earlier owner placed it, or it
may have waited for one whose answer is not streamed, which tells no end of its prefill.

Of a prompt of which KV was loaded from a lower tier, the curve says how long its computed tokens took. The rest of its time is a
sample of the load's price, if the instance had no other prefill meanwhile: loads and other prompts' prefills run side by side.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from pointsman_router.core.kv_load import LoadPrices
from pointsman_router.core.learning.load_price_fit import LoadPriceObserver
from pointsman_router.core.load.reservations import Reservation, Reservations
from pointsman_router.core.placement_types import InstanceInfo, StepTotals
from pointsman_router.core.prefill_curve import (
    DEFAULT_CURVE,
    MeanWork,
    PrefillCurve,
    PrefillCurveFit,
    PrefillSums,
    PrefillWork,
)

# Share of the predicted time below which a prefill is ignored. It was computed in one engine step with the previous one, so the
# time between their ends is not its own.
_TOGETHER = 0.2
# Number of prefills in a row below this share that had the engine for themselves, from which on they are learned from: then the
# prediction is wrong, as after the first prompts of an engine that compiled its kernels meanwhile.
_TOO_FAST = 16
# Minimum time of a prefill that is learned from, s.
_LEAST_S = 1e-3
# Minimum interval between two samples of steps that one curve learns, s. The instances of a large pool report far more samples
# than a curve needs, and each takes some 40 us.
_STEPS_INTERVAL_S = 0.02


@dataclass(slots=True)
class _Watched:
    """The watched prefills of one instance."""

    # Request id -> (time of opening, number), in order of arrival. Not a dict: finding its first key takes a step for each key
    # that was removed before.
    opened: OrderedDict[str, tuple[float, int]] = field(default_factory=OrderedDict)
    # The open requests that were opened here and whose answers are not streamed, or not said to be -> when their prefills were
    # complete by their events, s; inf: not known. The prefills of those that are not in `opened` any more have ended.
    whole: dict[str, float] = field(default_factory=dict)
    number: int = 0  # of the prefill opened last
    mixed: int = 0  # prefills with numbers up to this one are not learned from
    advanced_at: float = 0.0  # when the first prefill last progressed, s
    freed_at: float = 0.0  # when a prefill last ended, s
    steps: StepTotals | None = None  # the last totals of an engine that reports its steps


class PrefillObserver:
    """Observes open prefills. Keeps a curve for each pool and kind of hardware, and the mean work of each pool.

    A new owner of a pool takes over the mean work. It learns the curves anew, unless the engines report their steps, from which
    every router learns. Decisions use a curve in multiples of the mean work, so a wrong scale cancels out, and the right scale is
    known after a dozen prefills.
    """

    def __init__(self, reservations: Reservations) -> None:
        self._reservations = reservations
        self._watched: dict[str, _Watched] = {}
        self._fits: dict[tuple[str, str], PrefillCurveFit] = {}
        # The same keys -> number of prefills in a row that were too fast, and alone (_TOO_FAST).
        self._too_fast: Counter[tuple[str, str]] = Counter()
        self._means: dict[str, MeanWork] = {}
        self._stored_means: dict[str, MeanWork] = {}
        self._steps_learned_at: dict[tuple[str, str], float] = {}
        self._loads = LoadPriceObserver()

    def load_prices(self, pool: str, hardware: str, token_bytes: int) -> LoadPrices:
        """Return what loading KV from lower tiers costs in a pool on a kind of hardware, as LoadPriceObserver.prices."""
        return self._loads.prices(pool, hardware, token_bytes)

    def load_samples(self, pool: str, hardware: str, tier: str) -> int:
        """Return how many loads the price of a tier ("host" or "storage") was learned from."""
        return self._loads.samples(pool, hardware, tier)

    def curve(self, pool: str, hardware: str) -> PrefillCurve:
        """Return the curve of a pool on a kind of hardware; the default curve if nothing is learned yet."""
        fit = self._fits.get((pool, hardware))
        return fit.curve if fit else DEFAULT_CURVE

    def samples(self, pool: str, hardware: str) -> int:
        """Return how many samples the curve was learned from: prefills, or the steps that one report covers."""
        fit = self._fits.get((pool, hardware))
        return fit.samples if fit else 0

    def prediction(self, pool: str, hardware: str) -> tuple[PrefillCurve, bool]:
        """Return the curve, and whether it is learned."""
        fit = self._fits.get((pool, hardware))
        return (fit.curve, fit.samples >= fit.TRUSTED_AFTER) if fit else (DEFAULT_CURVE, False)

    def mean_work(self, pool: str) -> PrefillWork:
        """Return the mean prefill work of the pool's requests; zero before the first."""
        mean_work = self._means.get(pool)
        return mean_work.work if mean_work else PrefillWork()

    def advanced_at(self, instance_id: str) -> float:
        """Return when the first of an instance's prefills began, or last progressed; 0 if unknown."""
        watched = self._watched.get(instance_id)
        return watched.advanced_at if watched else 0.0

    def mean_work_record(self, pool: str) -> MeanWork | None:
        """Return the pool's mean work with its number of requests, for a later owner; None before the first request."""
        return self._means.get(pool)

    def count_request(self, pool: str, new: int, cached: int, length: int) -> MeanWork | None:
        """Count a request that was placed with `new` tokens after `cached` ones (`length`: as in token_pairs). Return the new
        mean work if it differs enough from the one returned last, else None. Mutates."""
        mean_work = self._means[pool] = self._means.get(pool, MeanWork()).after(new, cached, length)
        if not mean_work.differs_from(self._stored_means.get(pool, MeanWork())):
            return None
        self._stored_means[pool] = mean_work
        return mean_work

    def take_over(self, pool: str, mean_work: MeanWork | None) -> None:
        """Start with the mean work that the pool's previous owner stored. Mutates."""
        self._stored_means.pop(pool, None)
        if mean_work is not None:
            self._means[pool] = self._stored_means[pool] = mean_work

    def opened(self, reservation: Reservation, info: InstanceInfo | None, now: float, *, whole: bool = False) -> None:
        """Start to observe the prefill of a step that was reserved. `whole`: its answer is not streamed, or not said to be, so
        its first token may never be told. Mutates; O(1)."""
        if not reservation.new_tokens or info is None:  # info is None: the instance is gone, so nothing is learned
            return
        watched = self._watched.setdefault(reservation.instance_id, _Watched())
        watched.opened.pop(reservation.request_id, None)
        watched.number += 1
        if not self._has_others(reservation, watched):
            watched.advanced_at = now
        elif info.long_prefill_token_threshold:
            watched.mixed = watched.number
        watched.opened[reservation.request_id] = now, watched.number
        if whole:
            watched.whole[reservation.request_id] = inf

    def announced(self, reservation: Reservation, now: float) -> None:
        """Count progress only from `now` on if the instance's first prefill is this one, which another router has placed. Nothing
        is learned from it. Mutates; O(1)."""
        if reservation.pending_tokens:
            watched = self._watched.setdefault(reservation.instance_id, _Watched())
            if not self._has_others(reservation, watched):
                watched.advanced_at = now

    def moved(self, instance_id: str, complete: Iterable[str], now: float) -> None:
        """Record that prefills of the instance have progressed, by its events, and which of these are `complete`. Mutates."""
        if (watched := self._watched.get(instance_id)) is None:
            return
        watched.advanced_at = now
        for request_id in complete:
            if request_id in watched.whole:
                watched.whole[request_id] = now

    def done(
        self,
        reservation: Reservation,
        info: InstanceInfo | None,
        now: float,
        *,
        doubtful: bool,
        with_answer: bool = False,
    ) -> None:
        """Record that a prefill ended with its first token, or with its step, and learn its cost. `reservation`: as it was before
        the end. `doubtful`: the tokens computed may differ from those expected. `with_answer`: an answer that is not streamed is
        told together with its first token. Mutates; O(1) but for the answers that are not streamed."""
        watched = self._watched.get(reservation.instance_id)
        if watched is None or reservation.request_id not in watched.opened or with_answer:
            self.gone(reservation, now)
            return
        watched.whole.pop(reservation.request_id, None)
        opened_at, number = watched.opened[reservation.request_id]
        while watched.whole.get(first := next(iter(watched.opened)), inf) <= opened_at:
            del watched.opened[first]
        in_order = self._first(reservation.instance_id, watched) == reservation.request_id
        began = max(opened_at, watched.freed_at)
        known = in_order and number > watched.mixed and not doubtful
        alone = number == watched.number and opened_at >= watched.freed_at
        self._drop(watched, reservation.request_id, now)
        if not in_order:
            watched.mixed = watched.number
            while watched.opened:
                other, (_, came) = next(iter(watched.opened.items()))
                if other not in watched.whole or came > number:
                    break
                _ends_untold(watched, other, now)
        if not known or info is None:
            return
        if reservation.kv_load.tokens:
            if alone:
                self._learn_load(reservation, info, now - began, now)
        elif watched.steps is None:
            self._learn(reservation, info, now - began, alone=alone)

    def steps_reported(self, info: InstanceInfo, steps: StepTotals, now: float) -> None:
        """Learn from the steps that an engine has computed since its last report. Mutates; O(1)."""
        watched = self._watched.setdefault(info.instance_id, _Watched())
        before, watched.steps = watched.steps, steps
        if before is None or steps.prefill_tokens <= before.prefill_tokens:
            return
        key = info.model, info.hardware
        seconds = steps.prefill_seconds - before.prefill_seconds
        if seconds < _LEAST_S or now - self._steps_learned_at.get(key, -_STEPS_INTERVAL_S) < _STEPS_INTERVAL_S:
            return
        computed = PrefillSums(
            steps.prefills - before.prefills,
            steps.prefill_tokens - before.prefill_tokens,
            steps.prefill_pairs - before.prefill_pairs,
        )
        self._steps_learned_at[key] = now
        self._fits.setdefault(key, PrefillCurveFit()).learn_steps(computed, seconds)

    def gone(self, reservation: Reservation, now: float) -> None:
        """Stop observing a request that ended, or moved, before its prefill did; no effect if it is not observed. Mutates."""
        request_id = reservation.request_id
        if (watched := self._watched.get(reservation.instance_id)) is None:
            return
        if request_id in watched.opened:
            if request_id in watched.whole:
                _ends_untold(watched, request_id, now)
            else:
                self._drop(watched, request_id, now)
        watched.whole.pop(request_id, None)

    def forget(self, instance_id: str) -> None:
        """Drop an instance that is gone, or has a new incarnation. Mutates."""
        self._watched.pop(instance_id, None)

    def forget_pool(self, pool: str) -> None:
        """Drop what was learned of a pool that has been gone for long. Mutates; O(pools x kinds of hardware)."""
        self._fits = {key: fit for key, fit in self._fits.items() if key[0] != pool}
        self._steps_learned_at = {key: at for key, at in self._steps_learned_at.items() if key[0] != pool}
        self._too_fast = Counter({key: count for key, count in self._too_fast.items() if key[0] != pool})
        self._means.pop(pool, None)
        self._stored_means.pop(pool, None)
        self._loads.forget_pool(pool)

    def check_invariants(self) -> None:
        """Raise AssertionError if a prefill is observed that is not open, or the orders differ."""
        for instance_id, watched in self._watched.items():
            numbers = [number for _, number in watched.opened.values()]
            assert numbers == sorted(numbers), instance_id
            queue = [
                reservation.request_id
                for reservation in self._reservations.open_prefills(instance_id)
                if reservation.pending_tokens > 0 or reservation.request_id in watched.opened
            ]
            assert [request_id for request_id in queue if request_id in watched.opened] == list(watched.opened), (
                instance_id
            )
            untold = bool(queue) and queue[0] in watched.whole and queue[0] not in watched.opened
            first = next(iter(list(watched.opened) if untold else queue), None)
            assert self._first(instance_id, watched) == first, instance_id
            assert all(self._reservations.get(request_id) is not None for request_id in watched.whole), instance_id
            for request_id in watched.opened:
                reservation = self._reservations.get(request_id)
                assert reservation is not None
                assert reservation.instance_id == instance_id, request_id

    def _has_others(self, reservation: Reservation, watched: _Watched) -> bool:
        """Return whether the instance has a prefill to compute other than this one, which is not observed yet."""
        pending = self._reservations.counters(reservation.instance_id).pending_prefills
        own = self._reservations.get(reservation.request_id)
        return bool(watched.opened) or pending > (own is not None and own.pending_tokens > 0)

    def _first(self, instance_id: str, watched: _Watched) -> str | None:
        """Return the first to arrive of the prefills that the instance has to compute. A prefill that is complete by its events,
        but whose end is not reported yet, still counts; a request between two slices does not, nor one of which nothing told the
        end."""
        pending = self._reservations.first_prefill(instance_id)
        opened = next(iter(watched.opened), None)
        if pending is not None and pending.request_id in watched.whole and pending.request_id not in watched.opened:
            pending = None
        if pending is None or opened is None:
            return opened if pending is None else pending.request_id
        earlier = self._reservations.came_before(instance_id, opened, pending.request_id)
        return opened if earlier else pending.request_id

    def _drop(self, watched: _Watched, request_id: str, now: float) -> None:
        del watched.opened[request_id]
        watched.advanced_at = watched.freed_at = now

    def _learn(self, reservation: Reservation, info: InstanceInfo, seconds: float, *, alone: bool) -> None:
        if seconds < _LEAST_S:
            return
        new, cached, key = reservation.new_tokens, reservation.cached_tokens, (reservation.pool, info.hardware)
        fit = self._fits.setdefault(key, PrefillCurveFit())
        if fit.samples < fit.TRUSTED_AFTER or seconds >= _TOGETHER * fit.curve.cost_s(new, cached):
            self._too_fast.pop(key, None)
        elif not alone:
            return
        else:
            self._too_fast[key] += 1
            if self._too_fast[key] < _TOO_FAST:
                return
        fit.learn(new, cached, seconds)

    def _learn_load(self, reservation: Reservation, info: InstanceInfo, seconds: float, now: float) -> None:
        """Learn from a prefill that began with a load. It says nothing before the curve is known."""
        fit = self._fits.get((reservation.pool, info.hardware))
        if fit is not None and fit.samples >= fit.TRUSTED_AFTER:
            price = reservation.kv_load.price_tokens
            computed_s = fit.curve.cost_s(reservation.new_tokens - price, reservation.cached_tokens + price)
            self._loads.learn(reservation.pool, info, reservation.kv_load, seconds - computed_s, now)


def _ends_untold(watched: _Watched, request_id: str, now: float) -> None:
    """Observe a prefill no longer that ended some time before now. Those that may have waited for it teach nothing. Mutates."""
    del watched.opened[request_id]
    watched.mixed = watched.number
    watched.advanced_at = now
