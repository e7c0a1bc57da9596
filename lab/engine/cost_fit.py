"""From what steps took to what they cost: least squares over measurements of one engine. Pure.

The model is Profile's. A prefill of n tokens after c cached ones in k steps takes wake_s + k * step_s + prefill_token_s * n +
prefill_pair_s * n * (2c + n) + prefill_kv_token_s * (what was computed before each step, added up); a step that decodes B
sequences with T tokens of KV together takes step_s + decode_sequence_s * B + decode_kv_token_s * T. All measurements are fitted
at once, none of the costs negative, so that the sum of the relative errors' sizes is least: by least squares, weighed anew by
what each measurement missed. A stall of the machine shall not bend the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from pointsman.lab.engine.cost_profile import STEP_COSTS, Profile


class FitError(ValueError):
    """Measurements that no profile follows from."""


@dataclass(frozen=True)
class PrefillTime:
    """`new` tokens (2 or more) were computed after `cached` ones, at most `chunk` in a step, in `seconds`, by an engine that had
    nothing to do before."""

    new: int
    cached: int
    chunk: int
    seconds: float

    @property
    def steps(self) -> int:
        """How many steps it took."""
        return -(-self.new // self.chunk)

    @property
    def before(self) -> int:
        """Tokens that were computed before each step, of all steps together."""
        return self.steps * self.cached + self.chunk * (self.steps * (self.steps - 1) // 2)

    def __str__(self) -> str:
        return f"prefill of {self.new} after {self.cached}"


@dataclass(frozen=True)
class DecodeTime:
    """A step that decoded `batch` sequences, with `kv_tokens` of KV together, took `seconds` in the mean."""

    batch: int
    kv_tokens: float
    seconds: float

    def __str__(self) -> str:
        return f"decode of {self.batch} over {self.kv_tokens:.0f}"


Measurement = PrefillTime | DecodeTime
FloatArray = NDArray[np.float64]
# Of the reweighting; below so small a relative error measurements weigh the same.
ROUNDS = 30
SMALLEST_ERROR = 0.001


@dataclass(frozen=True)
class Fit:
    """A profile and what it makes of each measurement, in s. `residual` is the median size of the relative errors."""

    profile: Profile
    rows: tuple[tuple[Measurement, float], ...]

    @property
    def residual(self) -> float:
        """Relative, 0 for a perfect fit."""
        return float(np.median([abs(fitted / one.seconds - 1) for one, fitted in self.rows]))

    def with_streaming_cost(self, streamed_decodes: Sequence[DecodeTime]) -> Profile:
        """The profile of an engine that shares its machine with those who carry its tokens away: each sequence in a decode step
        costs what the steps in `streamed_decodes`, in the median, took longer than was fitted to steps without them."""
        costs = self.profile
        more = [(one.seconds - costs.decode_step_s(one.batch, one.kv_tokens)) / one.batch for one in streamed_decodes]
        each_s = max(0.0, median(more)) if more else 0.0
        return replace(costs, decode_sequence_s=costs.decode_sequence_s + each_s)


def fit(measured: Sequence[Measurement], base: Profile | None = None) -> Fit:
    """Fit the step costs; those of transfers are `base`'s. Raises FitError when there are too few different measurements."""
    if any(one.seconds <= 0 for one in measured):
        raise FitError("a measurement took no time")
    terms = np.array([_terms(one) for one in measured], dtype=float).reshape(-1, len(STEP_COSTS))
    seconds = np.array([one.seconds for one in measured])
    weighed = terms / seconds[:, None]
    # Columns of one size, or the rank would be judged by units.
    sizes = np.linalg.norm(weighed, axis=0)
    if not sizes.all() or np.linalg.matrix_rank(weighed / sizes) < len(STEP_COSTS):
        raise FitError(f"{len(measured)} measurements do not tell {len(STEP_COSTS)} costs apart")
    costs = _least_absolute_error(weighed, np.ones(len(seconds)))
    profile = replace(
        base or Profile(), **{name: float(f"{value:.5g}") for name, value in zip(STEP_COSTS, costs, strict=True)}
    )
    return Fit(profile, tuple(zip(measured, (terms @ costs).tolist(), strict=True)))


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither negative, of y over x: those that the points miss least, as above."""
    terms = np.array([(1.0, x) for x, _ in points])
    intercept, slope = _least_absolute_error(terms, np.array([max(y, 0.0) for _, y in points]))
    return float(intercept), float(slope)


def chunk_size(stored: Sequence[int], block_size: int) -> int | None:
    """Tokens per step, from how many blocks each step of one long cold prefill filled, its last step included; None when one step
    did it all. Where several sizes would do, the roundest."""
    low, high, total = 1, sum(stored) * block_size + block_size, 0
    for number, blocks in enumerate(stored[:-1], 1):
        total += blocks
        low = max(low, -(-total * block_size // number))
        high = min(high, -(-(total + 1) * block_size // number))
    if len(stored) < 2 or low >= high:
        return None
    return max(range(low, high), key=lambda size: (size & -size, size))


def _least_absolute_error(terms: FloatArray, values: FloatArray) -> FloatArray:
    """x >= 0 for which the sum of |terms @ x - values| is least."""
    sizes = np.linalg.norm(terms, axis=0)
    # A column of zeros says nothing of its x.
    sizes[sizes == 0] = 1.0
    smallest = SMALLEST_ERROR * (float(np.mean(values)) or 1.0)
    weights = np.ones(len(values))
    for _ in range(ROUNDS):
        scaled, _ = nnls(terms / sizes * weights[:, None], values * weights)
        found: FloatArray = scaled / sizes
        weights = 1 / np.sqrt(np.maximum(np.abs(terms @ found - values), smallest))
    return found


def _terms(one: Measurement) -> tuple[float, ...]:
    if isinstance(one, DecodeTime):
        return 1.0, 0.0, 0.0, 0.0, one.batch, one.kv_tokens, 0.0
    return one.steps, one.new, one.new * (2.0 * one.cached + one.new), one.before, 0.0, 0.0, 1.0
