"""The cost of a prefill in seconds, as a curve that is learned from observed prefills. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, TypeVar

import msgspec

# Costs of a coder model of 30B parameters on a data-centre GPU. Until a prefill is observed, only the ratio of the last two
# matters.
_BASE_S, _TOKEN_S, _PAIR_S = 0.005, 4.7e-5, 2.8e-9
_Tokens = TypeVar("_Tokens", int, float)


class PrefillWork(msgspec.Struct, frozen=True, gc=False):
    """Work of prefills: tokens to compute, and pairs of such a token with each token it attends to (each pair counted twice)."""

    tokens: float = 0.0
    pairs: float = 0.0


def token_pairs(new: _Tokens, cached: _Tokens, length: _Tokens) -> _Tokens:
    """Return the pairs (PrefillWork) of `new` tokens after `cached` ones. `length`: mean length of the request's prompts, in
    tokens: those of a list do not attend to each other."""
    return new * (2 * min(cached, length) + min(new, length))


class PrefillSums(msgspec.Struct, frozen=True, gc=False):
    """The sums of several prefills: their number, and the tokens and pairs (see PrefillWork) that are left of all together."""

    prefills: int = 0
    tokens: float = 0.0
    pairs: float = 0.0

    def mean(self) -> tuple[float, float]:
        """Return (new, cached) tokens such that `prefills` prefills with these have the same sums. `prefills` must not be 0."""
        new = self.tokens / self.prefills
        return new, max(self.pairs / self.tokens - new, 0.0) / 2.0


NO_PREFILLS = PrefillSums()


class PrefillCurve(msgspec.Struct, frozen=True, gc=False):
    """Seconds of a prefill of n new tokens after c cached ones: base_s + token_s * n + pair_s * n * (2c + n).

    The last term is the cost of attention: each new token attends to all tokens before it. Without this term, a long prompt's
    cost is wrong by a factor of several (in the reference system 64k tokens take 26 times as long as 8k).
    """

    base_s: float = _BASE_S
    token_s: float = _TOKEN_S
    pair_s: float = _PAIR_S

    def cost_s(self, new: float, cached: float, length: float = math.inf) -> float:
        """Return the seconds for `new` tokens after `cached` ones; 0 if `new` is 0 or less. `length`: as in token_pairs."""
        if new <= 0:
            return 0.0
        if new + cached > length:
            return self.base_s + new * self.token_s + self.pair_s * token_pairs(new, cached, length)
        return self.base_s + new * (self.token_s + self.pair_s * (2.0 * cached + new))

    def total_s(self, prefills: Iterable[tuple[int, int]]) -> float:
        """Return the seconds for several prefills, each (new, cached) with new > 0."""
        base, token, pair = self.base_s, self.token_s, self.pair_s
        total = 0.0
        for new, cached in prefills:
            total += base + new * (token + pair * (2.0 * cached + new))
        return total

    def sums_s(self, sums: PrefillSums) -> float:
        """Return the seconds for several prefills, from their sums."""
        return self.base_s * sums.prefills + self.token_s * sums.tokens + self.pair_s * sums.pairs

    def work_s(self, work: PrefillWork) -> float:
        """Return the seconds for one prefill with this work."""
        return self.base_s + self.token_s * work.tokens + self.pair_s * work.pairs

    def tokens_in(self, seconds: float, cached: float) -> float:
        """Return how many new tokens after `cached` ones take `seconds`; 0 if even one takes longer. The inverse of `cost_s`."""
        left = seconds - self.base_s
        if left <= 0:
            return 0.0
        per_token = self.token_s + 2.0 * self.pair_s * cached
        if self.pair_s <= 0.0:
            return left / per_token if per_token > 0 else math.inf
        return (math.sqrt(per_token * per_token + 4.0 * self.pair_s * left) - per_token) / (2.0 * self.pair_s)


DEFAULT_CURVE = PrefillCurve()


# For each of the three terms, the indexes of the other two.
OTHERS = ((1, 2), (0, 2), (0, 1))


class PrefillCurveFit:
    """Fits the curve's three coefficients by recursive least squares of the errors relative to the prediction.

    Each new sample multiplies the weight of older ones by `KEEP`, so the fit follows an engine that changes, and takes constant
    memory (3x3 sums). A prior has the default curve's shape at the scale seen so far. It determines the coefficients that samples
    say nothing about, so that none grows without bounds while all prompts are alike. Coefficients stay within a factor `RANGE` of
    the prior. Samples are clipped to a factor `CLIP` of the prediction, so that one stalled engine does not change the curve.
    """

    KEEP = 0.98
    # Minimum weight of the newest sample in the mean scale.
    SCALE_RATE = 0.05
    # Weight of the prior against the samples.
    PRIOR = 0.2
    RANGE = 20.0
    CLIP = 3.0
    # Number of samples from which on the learned curve is the prediction.
    TRUSTED_AFTER = 4
    # Range of a valid sample, s. Samples outside are ignored.
    SECONDS = (1e-5, 1e5)
    # Maximum number of new or cached tokens of a valid sample.
    TOKENS = 10**8

    def __init__(self) -> None:
        self.samples = 0
        self.curve = DEFAULT_CURVE
        self._log_scale = 0.0
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3

    def learn(self, new: int, cached: int, seconds: float) -> None:
        """Add a sample: a prefill of `new` tokens after `cached` ones took `seconds`. Mutates."""
        low, high = self.SECONDS
        if not (0 < new <= self.TOKENS and 0 <= cached <= self.TOKENS and low <= seconds <= high):
            return
        expected = seconds
        if self.samples >= self.TRUSTED_AFTER:
            expected = self.curve.cost_s(new, cached)
            seconds = min(max(seconds, expected / self.CLIP), expected * self.CLIP)
        # In multiples of the default curve's terms, so that all three are of similar size.
        terms = (_BASE_S / expected, _TOKEN_S * new / expected, _PAIR_S * new * (2 * cached + new) / expected)
        self._add(terms, seconds / expected, self.KEEP)

    def learn_steps(self, prefills: PrefillSums, seconds: float) -> None:
        """Add a sample: steps that took `seconds` computed these parts of prefills, and completed `prefills.prefills` of them.
        Mutates.

        The number of completed prefills determines the decay: a long prompt's many steps are not more than one prefill."""
        low, high = self.SECONDS
        if not (
            0 < prefills.tokens <= self.TOKENS
            and 0 <= prefills.prefills <= prefills.tokens
            and prefills.tokens <= prefills.pairs <= 2.0 * self.TOKENS * prefills.tokens
            and low <= seconds <= high
        ):
            return
        expected = seconds
        if self.samples >= self.TRUSTED_AFTER:
            expected = self.curve.sums_s(prefills)
            seconds = min(max(seconds, expected / self.CLIP), expected * self.CLIP)
        terms = (
            _BASE_S * prefills.prefills / expected,
            _TOKEN_S * prefills.tokens / expected,
            _PAIR_S * prefills.pairs / expected,
        )
        self._add(terms, seconds / expected, self.KEEP**prefills.prefills)

    def _add(self, terms: tuple[float, float, float], target: float, keep: float) -> None:
        """Add an equation: the sum of coefficient times term is `target`. Multiply the weight of older ones by `keep` first."""
        self.samples += 1
        rate = max(1.0 / self.samples, self.SCALE_RATE)
        self._log_scale += rate * (math.log(target / sum(terms)) - self._log_scale)
        for row, term in enumerate(terms):
            self._sums[row] = keep * self._sums[row] + term * target
            for column, other in enumerate(terms):
                self._squares[row][column] = keep * self._squares[row][column] + term * other
        base, token, pair = self._solved()
        self.curve = PrefillCurve(base * _BASE_S, token * _TOKEN_S, pair * _PAIR_S)

    def _solved(self) -> tuple[float, float, float]:
        """Return the bounded minimum, by coordinate descent: the sum is convex, and three coordinates converge quickly."""
        scale = math.exp(self._log_scale)
        ridge = self.PRIOR / scale**2
        low, high, close = scale / self.RANGE, scale * self.RANGE, 1e-4 * scale
        (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = self._squares
        x_sum, y_sum, z_sum = (total + ridge * scale for total in self._sums)
        xx, yy, zz = xx + ridge, yy + ridge, zz + ridge
        x = y = z = scale
        # No loop over the coordinates and no calls, for speed: this runs at each first token.
        for _ in range(30):
            x0, y0, z0 = x, y, z
            x = (x_sum - (xy * y + xz * z)) / xx
            x = low if x < low else high if x > high else x
            y = (y_sum - (yx * x + yz * z)) / yy
            y = low if y < low else high if y > high else y
            z = (z_sum - (zx * x + zy * y)) / zz
            z = low if z < low else high if z > high else z
            if -close <= x - x0 <= close and -close <= y - y0 <= close and -close <= z - z0 <= close:
                break
        return x, y, z


class MeanWork(msgspec.Struct, frozen=True, gc=False):
    """Moving average of the prefill work of `requests` requests. Kept as work, not as seconds, so that it holds for any curve."""

    # Minimum weight of the newest request in the mean.
    RATE: ClassVar[float] = 0.01
    # Factor by which the number of requests must grow for the mean to be stored again.
    CHANGED_REQUESTS: ClassVar[float] = 2.0
    # Relative change of tokens or pairs above which the mean is stored again.
    CHANGED_SHARE: ClassVar[float] = 0.1

    work: PrefillWork = PrefillWork()  # mean per request, by what was new and cached at its first placement
    requests: int = 0  # since the pool's first, those of earlier owners as last stored

    def after(self, new: int, cached: int, length: int) -> MeanWork:
        """Return the mean with one more request, of `new` tokens after `cached` ones on the instance where it was placed.
        `length`: as in token_pairs."""
        requests = self.requests + 1
        rate = max(1.0 / requests, self.RATE)
        tokens, pairs = self.work.tokens, self.work.pairs
        added = token_pairs(new, cached, length)
        work = PrefillWork(tokens + rate * (new - tokens), pairs + rate * (added - pairs))
        return MeanWork(work, requests)

    def differs_from(self, before: MeanWork) -> bool:
        """Return whether this mean differs enough from `before`, the one stored last, to be stored."""
        if self.requests >= self.CHANGED_REQUESTS * before.requests and before.requests < 1.0 / self.RATE:
            return True
        return (
            abs(self.work.tokens - before.work.tokens) > self.CHANGED_SHARE * before.work.tokens
            or abs(self.work.pairs - before.work.pairs) > self.CHANGED_SHARE * before.work.pairs
        )
