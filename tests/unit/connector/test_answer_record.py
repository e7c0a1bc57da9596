"""The answer record: what an engine writes beside its events is what it reads to go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_connector.answer_record import CONTINUED, asked, comment, read, record_of

PIECES = st.lists(st.lists(st.integers(0, 2**31), min_size=1, max_size=5), max_size=20)


@given(PIECES, st.booleans())
def test_what_is_recorded_is_read(pieces: list[list[int]], complete: bool) -> None:
    assert read(record_of(pieces, complete=complete)) == (pieces, complete)


@given(st.lists(PIECES, max_size=5))
def test_comments_one_after_another_are_the_answer(events: list[list[list[int]]]) -> None:
    texts = [comment(pieces, complete=False) for pieces in events]
    assert all(text == "" or (text.startswith(":") and text.endswith("\n\n")) for text in texts)
    whole = "".join([CONTINUED, *texts]).replace("\n", "")
    ids = [piece for pieces in events for piece in pieces]
    assert read(whole) == (ids, 0)
    after = comment([[7]], complete=True) + 2 * comment([], complete=True)
    assert read(whole + after.replace("\n", "")) == ([*ids, [7]], 3)


@pytest.mark.parametrize("text", [":5x", "5", ":5,", ":5..", ":.5", ".", ":-1", ":5:6\n", "$"])
def test_other_texts_are_not_answers(text: str) -> None:
    with pytest.raises(ValueError, match="not an answer record"):
        read(text)


def test_only_a_text_asks() -> None:
    assert asked(None) is None
    assert asked({"x": 1}) is None
    assert asked({"pointsman_answer": 5}) is None
    assert asked({"pointsman_answer": ""}) == ""


def test_several_events_are_counted() -> None:
    assert comment([[5], [6]], complete=False, events=2) == ":5:6x2\n\n"
    assert comment([], complete=False, events=2) == ":x2\n\n"
    assert comment([[5]], complete=True, events=1) == ":5.\n\n"
