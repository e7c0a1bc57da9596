"""The sequences of a request: how many its engine runs, what they compute, and how many are too many."""

from __future__ import annotations

import json
import time
from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import ApiRequestError, ClientRules, Endpoint, parse
from pointsman_gateway.core.http_message import Headers
from pointsman_gateway.core.pool_state import PoolState, instances_without
from pointsman_gateway.core.rate_limits import KeyCharge
from pointsman_gateway.core.request.prepare import RequestPreparer
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.tenants import ANYONE
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.token_cache import TokenCache
from tests.support import tokenizer_families

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def parsed(endpoint: Endpoint, **fields: Any) -> Any:
    return parse(endpoint, json.dumps({"model": "m"} | fields).encode())


@pytest.mark.parametrize(
    ("endpoint", "fields", "prompts", "answers"),
    [
        (Endpoint.CHAT, CHAT, 1, 1),
        (Endpoint.CHAT, CHAT | {"n": 16}, 1, 16),
        (Endpoint.CHAT, CHAT | {"n": "16"}, 1, 16),
        (Endpoint.CHAT, CHAT | {"n": None}, 1, 1),
        (Endpoint.MESSAGES, CHAT | {"max_tokens": 4, "n": 16}, 1, 1),
        (Endpoint.COMPLETION, {"prompt": "a"}, 1, 1),
        (Endpoint.COMPLETION, {"prompt": [1, 2, 3], "n": 2}, 1, 2),
        (Endpoint.COMPLETION, {"prompt": ["a", "b", "c"], "n": 2}, 3, 2),
        (Endpoint.COMPLETION, {"prompt": [[1], [2, 3]]}, 2, 1),
        (Endpoint.EMBEDDINGS, {"input": ["a", "b"]}, 2, 1),
        (Endpoint.EMBEDDINGS, {"input": [1, 2, 3]}, 1, 1),
        (Endpoint.RERANK, {"query": "q", "documents": ["a", "b", "c"]}, 3, 1),
        (Endpoint.SCORE, {"text_1": "a", "text_2": ["b", "c"]}, 2, 1),
    ],
)
def test_the_sequences_are_the_answers_to_each_prompt(
    endpoint: Endpoint, fields: dict[str, Any], prompts: int, answers: int
) -> None:
    call = parsed(endpoint, **fields)
    assert (call.prompts, call.answers, call.sequences) == (prompts, answers, prompts * answers)


@pytest.mark.parametrize(
    ("endpoint", "fields", "param", "says"),
    [
        (Endpoint.CHAT, CHAT | {"n": 16_385}, "n", "n must be at most 16384, got 16385."),
        (Endpoint.CHAT, CHAT | {"n": 2**31}, "n", "a positive integer"),
        (
            Endpoint.COMPLETION,
            {"prompt": ["a"] * 4, "n": 5_000},
            "n",
            "n must be at most 4096 for 4 prompts, got 5000.",
        ),
        (
            Endpoint.COMPLETION,
            {"prompt": [[1] * 6] * 100_000},
            "prompt",
            "prompt list length 100000 exceeds the maximum",
        ),
        (Endpoint.EMBEDDINGS, {"input": ["a"] * 16_385}, "input", "input list length 16385 exceeds the maximum"),
    ],
)
def test_too_many_sequences_are_refused(endpoint: Endpoint, fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiRequestError) as refused:
        parsed(endpoint, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert says in refused.value.message


def test_the_maximum_is_a_setting() -> None:
    rules = ClientRules(max_sequences=2)
    assert parse(Endpoint.CHAT, json.dumps(CHAT | {"n": 2}).encode(), rules).sequences == 2
    with pytest.raises(ApiRequestError, match="n must be at most 2, got 3"):
        parse(Endpoint.CHAT, json.dumps(CHAT | {"n": 3}).encode(), rules)


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(tokenizer_families.qwen(), None, None, cache=TokenCache(1 << 20))


def placed(tokenizer: ModelTokenizer | None, **fields: Any) -> tuple[placement_pb2.PlacementRequest, int]:
    """Return the placement request of a completion, and the number of its prompts' tokens."""
    call = parsed(Endpoint.COMPLETION, **fields)
    state = PoolState(placement_pb2.Pool(model="m"))
    context = RequestContext("r", "r", call, state, "", ANYONE, Headers(), KeyCharge(), time.monotonic())
    preparer = RequestPreparer(TokenCache(1 << 20))
    tokens = preparer.estimate(context) if tokenizer is None else preparer.tokens(context, tokenizer.prompt(call))
    preparer.prepare(context, tokens, time.monotonic(), dry=False)
    return context.placement, context.prompt_tokens


def test_a_prompt_with_several_answers_is_computed_once_and_attended_to_by_each(tokenizer: ModelTokenizer) -> None:
    one, tokens = placed(tokenizer, prompt=[7] * 100)
    assert (one.input_tokens, one.sequences, one.sequence_tokens, tokens) == (100, 0, 0, 100)
    several, tokens = placed(tokenizer, prompt=[7] * 100, n=16)
    assert (several.input_tokens, several.sequences, several.sequence_tokens, tokens) == (100, 16, 1600, 100)
    assert several.keys == one.keys
    estimated, tokens = placed(None, prompt="x" * 400, n=16)
    assert (estimated.input_tokens, estimated.sequences, estimated.sequence_tokens, tokens) == (100, 16, 1600, 100)


def test_what_several_prompts_begin_with_is_computed_once(tokenizer: ModelTokenizer) -> None:
    shots = list(range(100, 170))
    prompts = [[*shots, at, at, at] for at in range(8)]
    several, tokens = placed(tokenizer, prompt=prompts, n=2)
    # 64 of the 70 common tokens are whole blocks.
    assert (several.input_tokens, tokens) == (8 * 73 - 7 * 64, 8 * 73)
    assert (several.sequences, several.sequence_tokens) == (16, 2 * 8 * 73)
    assert len(several.keys) == 4
    assert several.sliceable_tokens == 0


def test_without_the_prefix_cache_each_sequence_computes_all(tokenizer: ModelTokenizer) -> None:
    several, tokens = placed(tokenizer, prompt=[[7] * 100] * 3, n=2, prompt_logprobs=1)
    assert (several.input_tokens, several.sequence_tokens, tokens) == (600, 600, 300)
    most, _ = placed(tokenizer, prompt=[7] * 2_000_000, n=16_384, prompt_logprobs=1)
    assert most.input_tokens == 2**32 - 1
    assert most.sequence_tokens == 2_000_000 * 16_384


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=2, max_size=5))
def test_the_common_tokens_are_those_of_all_prompts(tokenizer: ModelTokenizer, prompts: list[list[int]]) -> None:
    common = tokenizer.prompt(parsed(Endpoint.COMPLETION, prompt=prompts)).common
    assert all(one[:common] == other[:common] for one, other in pairwise(prompts))
    assert common == min(map(len, prompts)) or len({prompt[common] for prompt in prompts}) > 1


def test_a_million_common_tokens_are_found(tokenizer: ModelTokenizer) -> None:
    long = array("I", range(1_000_000)).tolist()
    assert tokenizer.prompt(parsed(Endpoint.COMPLETION, prompt=[[*long, 1], [*long, 2]])).common == 1_000_000


def test_an_adapter_is_on_the_instances_that_tell_so() -> None:
    def pool(**loaded: list[str]) -> placement_pb2.Pool:
        refs = [placement_pb2.InstanceRef(instance_id=name, lora_names=loras) for name, loras in loaded.items()]
        return placement_pb2.Pool(model="m", served_names=["alias"], lora_names=["x", "y"], instances=refs)

    some = pool(a=["x"], b=["x", "y"], c=[])
    assert (instances_without(some, "x"), instances_without(some, "y")) == (["c"], ["a", "c"])
    assert instances_without(some, "m") == instances_without(some, "alias") == instances_without(some, "other") == []
    assert instances_without(pool(a=[], b=[]), "x") == [], "a router of an earlier version tells nothing"
