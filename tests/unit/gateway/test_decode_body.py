"""Bodies decoded in pieces: the same values and errors as if decoded at once, and a bounded number of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pointsman_gateway.core.api import ApiRequestError, ClientRules, Endpoint, decode_body, parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=12) | st.just('"\\'),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=40,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of a few bytes, and room for a few values."""
    with monkeypatch.context() as patch:
        patch.setattr(decode_body, "PIECE_BYTES", 8)
        patch.setattr(decode_body, "MAX_OBJECTS", 400)
        patch.setattr(decode_body, "MAX_VALUES", 1_000)
        patch.setattr(decode_body, "MAX_STRINGS", 700)
        patch.setattr(decode_body, "_WINDOW_BYTES", 7)
        yield


def decoded(raw: bytes) -> Any:
    return decode_body.decode_body(raw).body


def result_of(decode: Any, raw: bytes) -> object:
    try:
        return decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return isinstance(error, RecursionError)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
@example([{"a": "b" * 20}, {"c": [{"d": 1}] * 9}], None, False)
@example({"a": [[[[[[[[{"b": 1}] * 3]]]]]]]}, 1, True)
def test_pieces_make_the_whole(value: Any, indent: int | None, ascii_only: bool) -> None:
    raw = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    assert decoded(raw) == msgspec.json.decode(raw)


@given(VALUES, st.data())
def test_what_is_no_json_is_none_in_pieces(value: Any, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(value).encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    assert result_of(decoded, bytes(raw)) == result_of(msgspec.json.decode, bytes(raw))


@pytest.mark.parametrize(
    "value",
    [
        [{}] * 401,
        [[]] * 401,
        {"a": [{"b": [[]] * 4}] * 100},
        [1] * 1_002,
        {str(at): at for at in range(701)},
        [""] * 701,
    ],
    ids=["objects", "lists", "nested", "numbers", "fields", "strings"],
)
def test_too_many_values_are_refused(value: object) -> None:
    with pytest.raises(ApiRequestError) as refused:
        decoded(json.dumps(value).encode())
    assert (refused.value.status, refused.value.code) == (400, "too_many_values")


@given(
    st.lists(st.text('\\"{[,', max_size=30) | st.lists(st.integers(0, 9), max_size=3), min_size=1), st.integers(2, 9)
)
def test_what_stands_in_texts_is_never_counted(values: list[Any], window: int) -> None:
    raw = json.dumps(values).encode()
    objects = 1 + sum(isinstance(value, list) for value in values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_body, "_WINDOW_BYTES", window)
        patch.setattr(decode_body, "MAX_OBJECTS", objects)
        assert decoded(raw) == values
        patch.setattr(decode_body, "MAX_OBJECTS", objects - 1)
        with pytest.raises(ApiRequestError):
            decoded(raw + b" " * 8)


def test_a_field_without_a_name_is_no_prompt() -> None:
    raw = json.dumps({"model": "m", "input": "a", "": [0] * 200}).encode()
    assert parse(Endpoint.EMBEDDINGS, raw, ClientRules(), lambda _: 100).model == "m"


@pytest.mark.parametrize("text", ["{[,]}" * 500, '"{' * 500, "\\" * 501 + "{" * 500, '\\"[,' * 500])
def test_text_may_have_any_number_of_brackets(text: str) -> None:
    value = {"messages": [{"role": "user", "content": text}], text: text}
    assert decoded(json.dumps(value).encode()) == value


def test_too_many_values_are_the_requests_own_fault_on_every_api() -> None:
    raw = json.dumps({"model": "m", "input": "a", "messages": [], "x": [{}] * 500}).encode()
    for endpoint in Endpoint:
        with pytest.raises(ApiRequestError, match="more than 400 objects"):
            parse(endpoint, raw)
