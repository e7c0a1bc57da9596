"""Which cached tokens of a usage a request has computed itself."""

from __future__ import annotations

import json
from typing import Any

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


def test_no_more_is_a_hit_than_an_engine_counts_whatever_it_counted_before() -> None:
    own = OwnPrefills()
    own.ended("a", 1_000, 0, 0)
    own.ended("a", 2_000, 1_000, 400_000)
    assert 0 <= own.among("a", 3_000) <= 3_000


def test_what_was_computed_at_one_instance_is_a_hit_at_no_other() -> None:
    own = sliced((1000, 0))
    assert own.among("b", 640) == 0
    assert own.among("a", None) == 0


def test_of_a_prefill_without_an_answer_the_prediction_counts() -> None:
    own = OwnPrefills()
    own.begun("b", 2000, 320)
    assert 2000 - own.among("b", 2000) == 320
    own.ended("b", 2000, 0, 64)
    assert 2000 - own.among("b", 2000) == 64


HIT = {"prompt_tokens": 1200, "prompt_tokens_details": {"cached_tokens": 992, "audio_tokens": None}}
CORRECTED = {"prompt_tokens": 1200, "prompt_tokens_details": {"cached_tokens": 16, "audio_tokens": None}}
ANTHROPIC = {"input_tokens": 208, "cache_read_input_tokens": 992}
# What a model may write: in a text, and as arguments of a tool, which are an object over Anthropic's API.
WRITTEN = {"text": json.dumps({"usage": HIT}), "content": [{"type": "tool_use", "input": {"usage": ANTHROPIC}}]}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"usage": HIT}, {"usage": CORRECTED}),
        ({"usage": ANTHROPIC}, {"usage": {"input_tokens": 1184, "cache_read_input_tokens": 16}}),
        (
            {"type": "response.completed", "response": {"usage": HIT}},
            {"type": "response.completed", "response": {"usage": CORRECTED}},
        ),
        (
            {"message": {"usage": ANTHROPIC}},
            {"message": {"usage": {"input_tokens": 1184, "cache_read_input_tokens": 16}}},
        ),
    ],
    ids=["openai", "anthropic", "response", "message"],
)
def test_usage_is_corrected_and_nothing_that_a_model_has_written(before: dict[str, Any], after: dict[str, Any]) -> None:
    own, answer = sliced((1000, 16)), json.dumps(WRITTEN | before).encode()
    assert json.loads(own.corrected("a", answer)) == WRITTEN | after
    event = b"event: e\ndata: %b\n\ndata: [DONE]\n\n"
    assert own.corrected_events("a", event % answer) == event % own.corrected("a", answer)
    assert own.corrected("b", answer) == answer


@pytest.mark.parametrize(
    "same",
    [
        b'{"usage": null}',
        b'{"usage": {"prompt_tokens": 5}}',
        b'{"usage": {"input_tokens": null, "cache_read_input_tokens": 900}}',
        b'{"usage": {"input_tokens": "many", "cache_read_input_tokens": 900}}',
        b'{"usage": {"prompt_tokens_details": {"cached_tokens": 900}, "a": "\xff"}}',
        b'{"usage": ' + b"[" * 5_000,
        b'{"response": ' * 5_000 + b'{"usage": {}',
        b'["usage"]',
        b'data: {"usage": {"prompt_tok',
    ],
)
def test_what_is_no_usage_stays_as_it_is(same: bytes) -> None:
    own = sliced((1000, 16))
    assert own.corrected("a", same) == same
    assert own.corrected_events("a", b"data: " + same) == b"data: " + same
