"""Which bodies are light, and so are parsed and rendered on the gateway's event loop: a coding agent's turns are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pointsman_gateway.core.api import decode_body
from pointsman_gateway.core.api.decode_body import LIGHT_BYTES, LIGHT_ITEMS, LIGHT_OBJECTS

CODE = """
// Returns the coordinates of all points, in the order of their distance.
export function coordinates(points) {
  const sorted = points.toSorted((one, other) => distance(one) - distance(other));
  return sorted.map((one) => [one.x, one.y]);
}
"""
VALUES = st.recursive(
    st.none() | st.integers() | st.text('\\"{[', max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


def decode_light(raw: bytes) -> Any:
    decoded = decode_body.decode_light(raw)
    return None if decoded is None else decoded.body


def objects_and_items(value: Any) -> tuple[int, int]:
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [objects_and_items(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(count for count, _ in inner), len(value) + sum(count for _, count in inner)


def turn_of_an_agent(messages: int = 200, tools: int = 30) -> bytes:
    """Return a request of about 500 KB, with the brackets of code in its texts."""
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in "abcdef"}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "read", "description": CODE, "parameters": schema}}
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": json.dumps({"a": CODE})}}
    turn = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": CODE * 18}]
    return json.dumps({"model": "m", "messages": turn * (messages // 2), "tools": [tool] * tools}).encode()


def test_an_agents_turn_is_light_whatever_its_code() -> None:
    raw = turn_of_an_agent()
    assert 400_000 < len(raw) < LIGHT_BYTES
    assert raw.count(b"{") + raw.count(b"[") > 2 * LIGHT_OBJECTS
    assert decode_light(raw) == json.loads(raw)


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [{"role": "user", "content": "a" * 40}] * LIGHT_OBJECTS},
        {"prompt": [1] * (LIGHT_ITEMS + 1)},
        {"prompt": "a" * LIGHT_BYTES},
        {"prompt": "{" * 40_000},
        {"prompt": "a" * 40_000, "x": [1.5] * 1_025},
        {"messages": [{"tool_calls": [{"function": {"arguments": '{"a":1,' * 40_000}}]}]},
    ],
    ids=["objects", "items", "bytes", "brackets", "floats", "arguments"],
)
def test_what_takes_long_is_not(value: object) -> None:
    assert decode_light(json.dumps(value).encode()) is None


@pytest.mark.parametrize("separators", [(",", ":"), None])
def test_many_objects_are_not_decoded_in_vain(
    monkeypatch: pytest.MonkeyPatch, separators: tuple[str, str] | None
) -> None:
    monkeypatch.setattr(decode_body, "_decoded_with_few_floats", lambda raw: pytest.fail("it was decoded"))
    value = {"messages": [{"role": "user", "content": "a" * 40}] * LIGHT_OBJECTS}
    assert decode_light(json.dumps(value, separators=separators).encode()) is None


def test_numbers_are_what_they_are_without_the_limit() -> None:
    value = {"prompt": "a" * 40_000, "temperature": 0.7, "x": [-0.0, 1e-400, 1.5e300, 12345678901234567890.5]}
    assert decode_light(json.dumps(value).encode()) == value
    assert decode_light(b'{"prompt": "' + b"a" * 40_000 + b'", "x": 1e400}') is None


@pytest.mark.parametrize("raw", [b"", b"{", b'"\xff"', b"[" * 5_000 + b"]" * 5_000, b'{"a": ' + b" " * 40_000])
def test_what_is_no_json_is_not(raw: bytes) -> None:
    assert decode_light(raw) is None


@given(VALUES, st.integers(0, 12), st.integers(0, 20))
def test_objects_and_items_are_counted_exactly(value: Any, objects: int, items: int) -> None:
    raw = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_body, "PIECE_BYTES", 0)
        patch.setattr(decode_body, "LIGHT_OBJECTS", objects)
        patch.setattr(decode_body, "LIGHT_ITEMS", items)
        has = objects_and_items(value)
        within = has[0] <= objects and has[1] <= items
        # A text that ends with a brace counts as an object.
        assume(not within or raw.count(b'{"') <= objects)
        assert decode_light(raw) == (value if within else None)
