"""Values of JSON schemas: allowed by the schema, the same again for the same draw, and never too many."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pointsman_lab.emulator.schema_values import MAX_VALUES, SchemaSampler

WORDS = (" left", " right", " signal")


def drawn(schema: object, seed: int = 0) -> dict[str, Any]:
    return SchemaSampler(schema, random.Random(seed), WORDS).arguments()


def bounds(low: str, high: str) -> st.SearchStrategy[dict[str, int]]:
    """A lower and an upper bound, either of them, or none."""
    pairs = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: {low: min(pair), high: max(pair)})
    return pairs | st.integers(0, 20).map(lambda one: {low: one}) | st.integers(0, 20).map(lambda one: {high: one})


SIMPLE: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda more: {"type": "string", **more}, bounds("minLength", "maxLength")),
    st.sampled_from(["date", "date-time", "email", "uuid", "ipv4", "ipv6"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.builds(
        lambda kind, more: {"type": kind, **more}, st.sampled_from(["integer", "number"]), bounds("minimum", "maximum")
    ),
    st.integers(1, 9).map(lambda step: {"type": "integer", "multipleOf": step, "exclusiveMinimum": 100}),
    st.lists(st.integers() | st.text(max_size=3) | st.none(), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(
        [
            {},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["null", "integer"]},
            {"const": {"a": 1}},
            {"$ref": "#/$defs/a"},
        ]
    ),
    st.just({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
)
NAMES = st.sampled_from("abcde")


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], required: set[str], more: bool) -> dict[str, Any]:
        names = sorted(required if more else required & properties.keys())
        closed = {} if more else {"additionalProperties": False}
        return {"type": "object", "properties": properties, "required": names, **closed}

    return st.builds(made, st.dictionaries(NAMES, inner, max_size=4), st.sets(NAMES), st.booleans())


def compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    counts = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda pair: {"minItems": min(pair), "maxItems": max(pair)}
    )
    return st.one_of(
        objects(inner),
        st.builds(lambda items, more: {"type": "array", "items": items, **more}, inner, counts),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda heads: {"type": "array", "prefixItems": heads, "items": False}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"description": "one", "anyOf": options}),
        st.builds(lambda one: {"allOf": [{"type": "object", "required": ["z"]}, one]}, objects(inner)).filter(
            lambda one: "additionalProperties" not in one["allOf"][1]
        ),
    )


@settings(max_examples=50)
@given(objects(st.recursive(SIMPLE, compound, max_leaves=8)), st.integers(0, 5))
def test_a_value_is_one_that_its_schema_allows(schema: dict[str, Any], seed: int) -> None:
    schema = {**schema, "$defs": {"a": {"type": "integer", "minimum": -3}}}
    value = drawn(schema, seed)
    Draft202012Validator(schema).validate(value)
    assert drawn(schema, seed) == value
    assert json.loads(json.dumps(value)) == value


KEYWORDS = (
    *(
        "type",
        "properties",
        "required",
        "items",
        "prefixItems",
        "anyOf",
        "oneOf",
        "allOf",
        "enum",
        "const",
        "$ref",
        "format",
    ),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems"),
    *("maxItems", "uniqueItems", "additionalProperties", "$defs"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=5),
    max_leaves=12,
)


@given(JSON, st.sampled_from(["object", "array", "string", "integer", "number"]))
def test_no_schema_is_too_broken(schema: Any, kind: str) -> None:
    assert isinstance(drawn(schema), dict)
    inner = {**schema, "type": kind} if isinstance(schema, dict) else schema
    assert set(drawn({"properties": {"a": inner}, "required": ["a"]})) == {"a"}


NODE = {
    "type": "object",
    "properties": {
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "all": {"items": {"$ref": "#/$defs/node"}},
    },
    "required": ["next", "all"],
}


def test_a_schema_that_contains_itself_ends() -> None:
    schema = {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}
    Draft202012Validator(schema).validate(drawn(schema))
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#"}}, "required": ["a", "b"]}
    assert json.dumps(drawn(endless)).count('"a"') <= MAX_VALUES
    assert drawn({"$ref": "#"}) == {}


@pytest.mark.parametrize(
    "much",
    [
        {"type": "array", "minItems": 10**9},
        {"type": "string", "minLength": 10**9},
        {"type": "integer", "minimum": 1e300},
    ],
)
def test_no_schema_gets_any_amount(much: dict[str, Any]) -> None:
    assert len(json.dumps(drawn({"properties": {"a": much}, "required": ["a"]}))) < 10_000


def test_items_that_must_differ_do() -> None:
    items = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True}
    assert sorted(drawn({"properties": {"a": items}, "required": ["a"]})["a"]) == [1, 2, 3]


def test_a_text_names_nothing_that_could_be_run() -> None:
    assert drawn({"properties": {"cmd": {"type": "string"}}, "required": ["cmd"]})["cmd"].startswith("emulated ")
