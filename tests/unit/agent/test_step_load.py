"""Which messages of engines are loads, and that each of those can be sent to routers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_agent.core.step_load import StepLoad

COUNTERS = ("steps", "decode_tokens", "prefill_tokens", "prefill_pairs", "prefills")


def message(load: dict[str, Any] | None = None, totals: dict[str, Any] | None = None) -> bytes:
    sums = dict.fromkeys(COUNTERS, 3) | {"seconds": 0.5, "prefill_seconds": 0.25} | (totals or {})
    fields = {"run": "7f", "rank": 0, "running": 7, "waiting": 2, "kv_usage": 0.5, "prefill_tokens_left": 1}
    return msgspec.msgpack.encode(fields | {"totals": sums} | (load or {}))


@pytest.mark.parametrize("field", ["rank", "running", "waiting", "prefill_tokens_left", "kv_usage"])
@pytest.mark.parametrize("value", [-1, 2**64 - 1, 1.5, math.nan, math.inf])
def test_a_load_out_of_range_is_not_one(field: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(message({field: value}), type=StepLoad)


@pytest.mark.parametrize("field", [*COUNTERS, "seconds", "prefill_seconds"])
@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf])
def test_totals_out_of_range_are_none(field: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(message(totals={field: value}), type=StepLoad)


@given(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("rank", "running", "waiting", "prefill_tokens_left"), st.integers(-(2**63), 2**64 - 1))
        | {"kv_usage": st.floats(0, 2)},
    ),
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(COUNTERS, st.integers(-(2**63), 2**64 - 1))
        | dict.fromkeys(("seconds", "prefill_seconds"), st.floats()),
    ),
)
def test_each_load_that_can_be_read_can_be_sent(load: dict[str, Any], totals: dict[str, Any]) -> None:
    try:
        read = msgspec.msgpack.decode(message(load, totals), type=StepLoad)
    except msgspec.ValidationError:
        return
    assert read.to_wire(None).steps.prefill_pairs == read.totals.prefill_pairs
