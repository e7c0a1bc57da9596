"""Fits costs to measured times of one engine by least squares. Pure.

The model is Profile's. A prefill of n tokens after c cached ones in k steps takes wake_s + k * step_s + prefill_token_s * n +
prefill_pair_s * n * (2c + n) + prefill_kv_token_s * (tokens computed before each step, summed over the steps). A step that
decodes B sequences with T tokens of KV in total takes step_s + decode_sequence_s * B + decode_kv_token_s * T. All measurements
are fitted at once, with no cost negative, so that the sum of the absolute relative errors is least: by least squares, reweighted
repeatedly by each measurement's error. A stall of the machine therefore has little effect on the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from pointsman_lab.engine.cost_profile import STEP_COSTS, Profile


class FitError(ValueError):
    """Measurements that do not determine a profile."""


@dataclass(frozen=True)
class PrefillTime:
    """An idle engine computed `new` tokens (2 or more) after `cached` ones, at most `chunk` in a step, in `seconds`."""

    new: int
    cached: int
    chunk: int
    seconds: float

    @property
    def steps(self) -> int:
        """Number of steps of the prefill."""
        return -(-self.new // self.chunk)

    @property
    def before(self) -> int:
        """Tokens that were computed before each step, summed over all steps."""
        return self.steps * self.cached + self.chunk * (self.steps * (self.steps - 1) // 2)

    def __str__(self) -> str:
        return f"prefill of {self.new} after {self.cached}"


@dataclass(frozen=True)
class DecodeTime:
    """The mean duration of a step that decodes `batch` sequences, with `kv_tokens` of KV in total, is `seconds`."""

    batch: int
    kv_tokens: float
    seconds: float

    def __str__(self) -> str:
        return f"decode of {self.batch} over {self.kv_tokens:.0f}"


Measurement = PrefillTime | DecodeTime
FloatArray = NDArray[np.float64]
# Number of rounds of reweighting.
ROUNDS = 30
# Relative error below which all measurements have the same weight.
SMALLEST_ERROR = 0.001


@dataclass(frozen=True)
class Fit:
    """A profile and the time that it predicts for each measurement, in s."""

    profile: Profile
    rows: tuple[tuple[Measurement, float], ...]

    @property
    def residual(self) -> float:
        """Median of the absolute relative errors; 0 for a perfect fit."""
        return float(np.median([abs(fitted / measurement.seconds - 1) for measurement, fitted in self.rows]))

    def with_streaming_cost(self, streamed_decodes: Sequence[DecodeTime]) -> Profile:
        """Return the profile of an engine that shares its machine with the receivers of its tokens. Each sequence in a decode
        step costs more by the median excess of the steps in `streamed_decodes` over the fit to steps without receivers."""
        costs = self.profile
        more = [
            (measurement.seconds - costs.decode_step_s(measurement.batch, measurement.kv_tokens)) / measurement.batch
            for measurement in streamed_decodes
        ]
        each_s = max(0.0, median(more)) if more else 0.0
        return replace(costs, decode_sequence_s=costs.decode_sequence_s + each_s)


def fit(measured: Sequence[Measurement], base: Profile | None = None) -> Fit:
    """Fit the step costs; the transfer costs are `base`'s. Raises FitError if there are too few different measurements."""
    if any(measurement.seconds <= 0 for measurement in measured):
        raise FitError("a measurement took no time")
    terms = np.array([_terms(measurement) for measurement in measured], dtype=float).reshape(-1, len(STEP_COSTS))
    seconds = np.array([measurement.seconds for measurement in measured])
    weighed = terms / seconds[:, None]
    # Scale the columns to one size; otherwise the rank would depend on their units.
    sizes = np.linalg.norm(weighed, axis=0)
    if not sizes.all() or np.linalg.matrix_rank(weighed / sizes) < len(STEP_COSTS):
        raise FitError(f"{len(measured)} measurements do not determine {len(STEP_COSTS)} costs")
    costs = _least_absolute_error(weighed, np.ones(len(seconds)))
    profile = replace(
        base or Profile(), **{name: float(f"{value:.5g}") for name, value in zip(STEP_COSTS, costs, strict=True)}
    )
    return Fit(profile, tuple(zip(measured, (terms @ costs).tolist(), strict=True)))


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope, neither negative, of the line y over x with the least sum of absolute errors."""
    terms = np.array([(1.0, x) for x, _ in points])
    intercept, slope = _least_absolute_error(terms, np.array([max(y, 0.0) for _, y in points]))
    return float(intercept), float(slope)


def chunk_size(stored: Sequence[int], block_size: int) -> int | None:
    """Return the tokens per step, from the numbers of blocks that each step of one long cold prefill filled, including its last
    step. Return None if there was only one step. If several sizes fit, return the one with most factors of 2."""
    low, high, total = 1, sum(stored) * block_size + block_size, 0
    for number, blocks in enumerate(stored[:-1], 1):
        total += blocks
        low = max(low, -(-total * block_size // number))
        high = min(high, -(-(total + 1) * block_size // number))
    if len(stored) < 2 or low >= high:
        return None
    return max(range(low, high), key=lambda size: (size & -size, size))


def _least_absolute_error(terms: FloatArray, values: FloatArray) -> FloatArray:
    """Return x >= 0 with the least sum of |terms @ x - values|."""
    sizes = np.linalg.norm(terms, axis=0)
    # A column of zeros does not determine its x.
    sizes[sizes == 0] = 1.0
    smallest = SMALLEST_ERROR * (float(np.mean(values)) or 1.0)
    weights = np.ones(len(values))
    for _ in range(ROUNDS):
        scaled, _ = nnls(terms / sizes * weights[:, None], values * weights)
        found: FloatArray = scaled / sizes
        weights = 1 / np.sqrt(np.maximum(np.abs(terms @ found - values), smallest))
    return found


def _terms(measurement: Measurement) -> tuple[float, ...]:
    if isinstance(measurement, DecodeTime):
        return 1.0, 0.0, 0.0, 0.0, measurement.batch, measurement.kv_tokens, 0.0
    return (
        measurement.steps,
        measurement.new,
        measurement.new * (2.0 * measurement.cached + measurement.new),
        measurement.before,
        0.0,
        0.0,
        1.0,
    )
