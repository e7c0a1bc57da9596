"""Which numbers of engines fit the fields of the agent's protocol."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.wire_numbers import finite, moment, share, uint32, uint64

ODD: list[Any] = [
    None,
    True,
    [],
    {},
    "",
    "None",
    "+Inf",
    "NaN",
    b"-Inf",
    "-1",
    -0.5,
    1e300,
    10**400,
    math.nan,
    "9" * 5_000,
    "²",
]


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:10] if not isinstance(value, int) else "int")
def test_what_is_no_number_of_a_field(value: object) -> None:
    for parse in (uint32, uint64, share):
        with pytest.raises(ValueError, match=r"number|not finite|not in the range|convert"):
            parse(value)


@pytest.mark.parametrize("value", ["0", "-1", "NaN", "+Inf", "none"])
def test_what_is_no_time(value: str) -> None:
    with pytest.raises(ValueError, match=r"no time|not finite|convert"):
        moment(value)
    assert moment("1.795e+09") == 1_795_000_000.0


def test_numbers_of_a_field() -> None:
    assert [uint64(written) for written in ("0", b"2.0", 1.9e6, "1.5e+07", 2**40, -0.0)] == [
        0,
        2,
        1_900_000,
        15_000_000,
        2**40,
        0,
    ]
    assert uint32(2**32 - 1) == 2**32 - 1
    with pytest.raises(ValueError, match="range"):
        uint32(2**32)
    assert (share("1.0"), share(b"1e-3"), finite("-2.5")) == (1.0, 1e-3, -2.5)


@given(st.one_of(st.floats(), st.integers(), st.floats().map(str), st.integers().map(str), st.text(max_size=9)))
def test_what_is_read_can_be_sent(value: object) -> None:
    for parse, field in ((uint32, "running"), (uint64, "generation_tokens"), (share, "kv_usage")):
        try:
            number = parse(value)
        except ValueError:
            continue
        fields: dict[str, Any] = {field: number}
        assert getattr(pb.Load(**fields), field) == number
