"""Numbers that engines send, checked against what the fields of the agent's protocol can hold. Pure."""

from __future__ import annotations

import math


def uint32(value: object) -> int:
    """Return a number, or its text, as an integer of 32 bits, without its fraction. Raises ValueError if it is none: negative,
    infinite, NaN, too large, or no number."""
    return _unsigned(value, 2**32 - 1)


def uint64(value: object) -> int:
    """The same for 64 bits."""
    return _unsigned(value, 2**64 - 1)


def share(value: object) -> float:
    """Return a number, or its text, as a float from 0 to 1. Raises ValueError if it is none."""
    number = finite(value)
    if not 0 <= number <= 1:
        raise ValueError(f"{number:g} is not in the range 0 to 1")
    return number


def moment(value: object) -> float:
    """Return a number, or its text, as a float above 0, a time in s since the epoch. Raises ValueError if it is none."""
    number = finite(value)
    if number <= 0:
        raise ValueError(f"{number:g} is no time")
    return number


def finite(value: object) -> float:
    """Return a number, or its text, as a float. Raises ValueError if it is infinite, NaN, or no number."""
    if not isinstance(value, int | float | str | bytes) or isinstance(value, bool):
        raise ValueError(f"a value of type {type(value).__name__} is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{number:g} is not finite")
    return number


def _unsigned(value: object, maximum: int) -> int:
    number = finite(value)
    if number < 0 or int(number) > maximum:
        raise ValueError(f"{number:g} is not in the range 0 to {maximum}")
    return int(number)
