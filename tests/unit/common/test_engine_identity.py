"""When two engines are interchangeable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.agent.v1 import agent_pb2
from pointsman_common.core.engine_identity import (
    UNKNOWN_IDENTITY,
    EngineIdentity,
    Use,
    compatible,
    differences,
    merged,
    words,
)

VALUES = {"dtype": ["", "float16", "bfloat16"], "kv_dtype": ["", "auto", "float16", "fp8", "bfloat16"]}
IDENTITIES = st.builds(
    EngineIdentity,
    **{name: st.sampled_from(VALUES.get(name, ["", "a", "b"])) for name in EngineIdentity.__struct_fields__},
)


@given(one=IDENTITIES, other=IDENTITIES, use=st.sampled_from(Use))
def test_it_is_symmetric_and_reflexive(one: EngineIdentity, other: EngineIdentity, use: Use) -> None:
    assert compatible(one, one, use)
    assert differences(one, other, use) == differences(other, one, use)
    assert compatible(one, UNKNOWN_IDENTITY, use)


@given(one=IDENTITIES, other=IDENTITIES)
def test_each_use_demands_what_the_one_before_does(one: EngineIdentity, other: EngineIdentity) -> None:
    assert set(differences(one, other, Use.TOKENS)) <= set(differences(one, other, Use.ANSWER))
    assert set(differences(one, other, Use.ANSWER)) <= set(differences(one, other, Use.KV))


@given(one=IDENTITIES, other=IDENTITIES)
def test_messages_and_records_compare_alike(one: EngineIdentity, other: EngineIdentity) -> None:
    mine, theirs = (
        agent_pb2.EngineIdentity(**{name: getattr(known, name) for name in EngineIdentity.__struct_fields__})
        for known in (one, other)
    )
    assert differences(mine, theirs) == differences(one, other) == differences(mine, other)


@given(one=IDENTITIES, other=IDENTITIES, third=IDENTITIES)
def test_what_is_known_of_both_contradicts_as_much_as_either(
    one: EngineIdentity, other: EngineIdentity, third: EngineIdentity
) -> None:
    if compatible(one, other, Use.KV) and "auto" not in (one.kv_dtype, other.kv_dtype):
        together = merged(one, other)
        # A digest that one of the two adds may decide that places do not differ.
        added = bool(one.weights_digest) != bool(other.weights_digest)
        added |= bool(one.tokenizer_digest) != bool(other.tokenizer_digest)
        if not added:
            assert set(differences(together, third)) >= set(differences(one, third)) - {"revision"}


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"dtype": "float16", "kv_dtype": "auto"}, {"dtype": "bfloat16", "kv_dtype": "auto"}, ("dtype",)),
        ({"kv_dtype": "auto"}, {"kv_dtype": "bfloat16"}, ()),
        ({"kv_dtype": "auto"}, {"kv_dtype": "fp8"}, ("kv_dtype",)),
        ({"kv_dtype": "float16"}, {"kv_dtype": "bfloat16"}, ("kv_dtype",)),
        ({"weights": "/a", "weights_digest": "1"}, {"weights": "/b", "weights_digest": "1"}, ()),
        ({"weights": "/a", "weights_digest": "1"}, {"weights": "/a", "weights_digest": "2"}, ("weights",)),
        ({"weights": "/a", "weights_digest": "1"}, {"weights": "/b"}, ("weights",)),
        ({"weights": "m/a", "revision": "1"}, {"weights": "m/a", "revision": "2"}, ("revision",)),
        ({"weights": "m/a", "revision": "1"}, {"weights": "m/a"}, ()),
        ({"quantization": "none"}, {"quantization": "fp8"}, ("quantization",)),
        ({"overrides": "none"}, {"overrides": "1f"}, ("overrides",)),
        ({"kv_layout": "HND"}, {"kv_layout": "NHD"}, ("kv_layout",)),
        ({"tokenizer": "a", "tokenizer_digest": "1"}, {"tokenizer": "b", "tokenizer_digest": "1"}, ()),
        ({"tokenizer": "a"}, {"tokenizer": "b"}, ("tokenizer",)),
    ],
)
def test_what_differs(one: dict[str, str], other: dict[str, str], found: tuple[str, ...]) -> None:
    assert differences(EngineIdentity(**one), EngineIdentity(**other)) == found


def test_equal_places_of_other_files_are_told_apart_by_their_digests() -> None:
    said = words("weights", EngineIdentity("/m", weights_digest="1"), EngineIdentity("/m", weights_digest="2"))
    assert said == "weights /m (1) and /m (2)"
