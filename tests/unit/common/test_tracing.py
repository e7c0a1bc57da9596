"""Places in a trace: what headers say, who is sampled, and that every part of a request has a place of its own."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_common.core.tracing import MAX_TEXT, SpanContext, known_attributes, parse_traceparent, start_trace

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_sent_on_is_read_back(trace_id: int, span_id: int, sampled: bool) -> None:
    place = SpanContext(trace_id, span_id, sampled)
    assert parse_traceparent(place.traceparent) == place


@pytest.mark.parametrize(
    ("header", "place"),
    [
        (HEADER, SpanContext(TRACE, SPAN, True)),
        (HEADER[:-1] + "0", SpanContext(TRACE, SPAN, False)),
        (HEADER[:-2] + "fe", SpanContext(TRACE, SPAN, False)),
        # A later version may say more than is known here.
        ("01" + HEADER[2:] + "-more", SpanContext(TRACE, SPAN, True)),
        (HEADER + "-more", None),
        ("ff" + HEADER[2:], None),
        (HEADER.upper(), None),
        (HEADER[:-3], None),
        (f"00-{'0' * 32}-{HEADER[36:]}", None),
        (f"{HEADER[:36]}{'0' * 16}-01", None),
        ("", None),
        (f"{HEADER}, {HEADER}", None),
    ],
)
def test_headers_are_read_as_the_standard_has_them(header: str, place: SpanContext | None) -> None:
    assert parse_traceparent(header) == place


@given(st.text(max_size=80))
def test_any_header_begins_a_request(header: str) -> None:
    place, parent_id = start_trace(header, 1.0, random.Random(1))
    assert place.sampled
    assert parent_id == 0
    assert parse_traceparent(place.traceparent) == place


@given(st.integers(), st.booleans(), st.floats(0, 1))
def test_a_clients_own_trace_goes_on_as_it_is_sampled_there(seed: int, sampled: bool, share: float) -> None:
    client = SpanContext(TRACE, SPAN, sampled)
    place, parent_id = start_trace(client.traceparent, share, random.Random(seed))
    assert (place.trace_id, place.sampled, parent_id) == (TRACE, sampled, SPAN)
    assert place.span_id != SPAN


def test_of_the_others_a_share_is_sampled() -> None:
    rng = random.Random(1)
    sampled = sum(start_trace("", 0.25, rng)[0].sampled for _ in range(4_000))
    assert 900 < sampled < 1_100
    assert not start_trace("", 0.0, rng)[0].sampled


@given(st.integers(1, 2**64 - 1), st.sets(st.text(max_size=20), min_size=2, max_size=30))
def test_each_name_below_a_place_is_a_place_of_its_own(span_id: int, names: set[str]) -> None:
    above = SpanContext(TRACE, span_id, True)
    below = {name: above.child(name) for name in names}
    assert len({place.span_id for place in below.values()} | {span_id}) == len(names) + 1
    assert all(place == above.child(name) for name, place in below.items())
    assert {(place.trace_id, place.sampled) for place in below.values()} == {(TRACE, True)}


def test_attributes_say_something_and_not_too_much() -> None:
    assert known_attributes({"a": None, "b": "", "c": 0, "d": False, "e": "x" * 500}) == {
        "c": 0,
        "d": False,
        "e": "x" * MAX_TEXT,
    }
