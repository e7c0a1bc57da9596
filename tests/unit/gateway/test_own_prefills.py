"""Which cached tokens of a usage a request has computed itself."""

from __future__ import annotations

import json

import pytest

from pointsman_gateway.core.request.own_prefills import OwnPrefills


def sliced(*slices: tuple[int, int]) -> OwnPrefills:
    """Slices at instance a, each with its end and the cached tokens that the engine counted."""
    own = OwnPrefills()
    for end, cached in slices:
        before = own.end("a")
        own.begun("a", end, 0)
        own.ended("a", end, before, cached)
    return own


@pytest.mark.parametrize(
    ("slices", "cached", "hits"),
    [
        ([], 640, 640),
        ([(1000, 0)], 992, 0),
        ([(1000, 0), (2000, 992)], 1984, 0),
        ([(1000, 320), (2000, 992)], 1984, 320),
        # The rest of the prompt has been computed for another request meanwhile.
        ([(1000, 320)], 3000, 320 + 2000),
        ([(1000, 0), (2000, 1600)], 1984, 600),
        # The engine has dropped what was there.
        ([(1000, 320)], 64, 64),
        ([(1000, 320)], 0, 0),
    ],
)
def test_only_what_was_there_without_the_request_is_a_hit(
    slices: list[tuple[int, int]], cached: int, hits: int
) -> None:
    assert cached - sliced(*slices).among("a", cached) == hits


def test_what_was_computed_at_one_instance_is_a_hit_at_no_other() -> None:
    own = sliced((1000, 0))
    assert own.among("b", 640) == 0
    assert own.among("a", None) == 0


def test_until_a_prefill_is_answered_the_prediction_counts() -> None:
    own = OwnPrefills()
    own.begun("b", 2000, 320)
    assert 2000 - own.among("b", 2000) == 320
    own.ended("b", 2000, 0, 64)
    assert 2000 - own.among("b", 2000) == 64


def test_usage_is_corrected_and_nothing_else() -> None:
    own = sliced((1000, 16))
    usage = {"prompt_tokens": 1200, "total_tokens": 1203, "completion_tokens": 3}
    quoted = json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": 992}}})
    answer = {"text": quoted, "usage": usage | {"prompt_tokens_details": {"cached_tokens": 992, "audio_tokens": None}}}
    corrected = json.loads(own.corrected("a", json.dumps(answer).encode()))
    assert corrected["text"] == quoted
    assert corrected["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 16, "audio_tokens": None}}
    fresh = b'{"usage":{"input_tokens":208,"cache_read_input_tokens":992}}'
    assert json.loads(own.corrected("a", fresh))["usage"] == {"input_tokens": 1184, "cache_read_input_tokens": 16}
    for same in (b'{"usage": null}', b'{"usage": {"prompt_tokens": 5}}', b'{"usage": {"a": {"b": {"c": 1}}}}'):
        assert own.corrected("a", same) == same
    assert own.corrected("b", json.dumps(answer).encode()) == json.dumps(answer).encode()
