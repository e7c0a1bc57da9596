"""The two requests of a KV transfer: what they carry, and when one of them may not be sent."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.core.api import ApiCall, ClientRules, Endpoint, parse, with_fields
from pointsman_gateway.core.request import transfer_params as kv

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MOONCAKE_ANSWER = b'{"choices":[{"finish_reason":"length"}],"kv_transfer_params":null}'


def call(endpoint: Endpoint = Endpoint.CHAT, **body: Any) -> ApiCall:
    base: dict[str, Any] = CHAT if endpoint is not Endpoint.COMPLETION else {"model": "m", "prompt": "hi"}
    return parse(endpoint, json.dumps(base | body).encode(), ClientRules(client_cache_salt=True))


@pytest.mark.parametrize(
    ("made", "inline_kv_transfer", "why"),
    [
        (call(stream=True), True, ""),
        (call(Endpoint.COMPLETION, stream=True), True, ""),
        (call(Endpoint.COMPLETION, stream=True, prompt=[1, 2]), True, ""),
        (call(Endpoint.COMPLETION, stream=True, prompt=["a"]), True, ""),
        (call(stream=True, n=1, response_format=None), True, ""),
        (call(), False, ""),
        (call(stream=True, n=2), False, ""),
        (call(stream=True, response_format={"type": "json_object"}), False, ""),
        (call(stream=True, structured_outputs={"regex": "a"}), False, ""),
        (call(stream=True, prompt_logprobs=1), False, "prompt_logprobs recompute the prompt"),
        (call(stream=True, echo=True), False, "prompt_logprobs recompute the prompt"),
        (call(Endpoint.COMPLETION, stream=True, echo=True, logprobs=1), False, "prompt_logprobs recompute the prompt"),
        (call(Endpoint.COMPLETION, stream=True, echo=True), True, ""),
        (call(Endpoint.COMPLETION, prompt=["a", "b"]), False, "several prompts"),
        (call(Endpoint.COMPLETION, prompt=[[1], [2]]), False, "several prompts"),
        (call(Endpoint.COMPLETION, prompt_embeds="x"), False, "prompt embeddings"),
        (call(Endpoint.MESSAGES, max_tokens=9, stream=True), False, ""),
        (call(Endpoint.EMBEDDINGS, input="x"), False, "a prompt that only its own API can render"),
    ],
)
def test_how_a_call_can_be_offloaded(made: ApiCall, inline_kv_transfer: bool, why: str) -> None:
    assert (kv.supports_inline_kv_transfer(made), kv.transfer_obstacle(made)) == (inline_kv_transfer, why)


@pytest.mark.parametrize(
    "made",
    [
        call(Endpoint.MESSAGES, max_tokens=9, thinking={"type": "disabled"}),
        call(Endpoint.MESSAGES, max_tokens=9, tools=[], cache_salt="s"),
        call(Endpoint.RESPONSES, input="hi", tools=[{"type": "web_search"}]),
    ],
)
def test_another_apis_prompt_is_sent_as_its_tokens(made: ApiCall) -> None:
    assert not kv.transfer_obstacle(made)
    ids = array("I", [1, 2, 3])
    assert kv.prefill_request(made, {"transfer_id": "t"}, ids) == kv.prefix_request(
        made, [1, 2, 3], {"transfer_id": "t"}
    )
    assert kv.prefill_request(call(), {}, ids) == kv.prefill_request(call(), {}), "a chat has tools that are parsed"


def test_another_apis_prompt_with_media_is_sent_as_the_chat_that_it_is() -> None:
    made = call(Endpoint.MESSAGES, max_tokens=9, system="be brief", cache_salt="s", stop_sequences=["x"])
    path, raw = kv.prefill_request(made, {"transfer_id": "t"})
    body = json.loads(raw)
    assert path == "/v1/chat/completions"
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert (body["model"], body["cache_salt"], body["max_completion_tokens"]) == ("m", "s", 1)
    assert "stop" not in body


def test_a_prefill_asks_for_no_logprobs_and_does_not_get_its_prompt_back() -> None:
    made = call(
        stream=True,
        logprobs=True,
        top_logprobs=2,
        logprob_token_ids=[5],
        return_token_ids=True,
        return_prompt_text=True,
    )
    body = kv.prefill_request(made, {})[1].decode()
    assert "logprob" not in body
    assert "return" not in body


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices":[{"finish_reason":"\xff"}]}',
        b'{"kv_transfer_params":{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}}",
        b'{"0":{"engine_id":"\xff"}}',
    ],
)
def test_an_answer_that_cannot_be_read_fails_the_transfer_alone(answer: bytes) -> None:
    for read in (kv.check_prefilled, kv.nixl_fetch, lambda text: kv.engine_id_of(text, 0)):
        with pytest.raises(kv.TransferError):
            read(answer)
    assert not kv.earlier_slices_evicted(answer, 1_000)


def test_a_slice_carries_model_and_salt() -> None:
    path, raw = kv.prefix_request(call(model="lora", cache_salt="s"), (1, 2, 3))
    body = json.loads(raw)
    assert (path, body["model"], body["cache_salt"], body["prompt"], body["max_tokens"]) == (
        "/v1/completions",
        "lora",
        "s",
        [1, 2, 3],
        1,
    )


@given(
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8) | st.none(), max_size=5),
    st.sampled_from([b"", b" ", b"\n"]),
)
def test_fields_are_added_and_all_else_stays(fields: dict[str, Any], space: bytes) -> None:
    fields.pop("kv_transfer_params", None)
    payload = space + json.dumps(CHAT | fields).encode() + space
    added = {"kv_transfer_params": {"transfer_id": "t"}}
    assert json.loads(with_fields(payload, added)) == CHAT | fields | added


@given(st.binary(max_size=60))
def test_any_answer_gives_params_or_a_transfer_error(answer: bytes) -> None:
    for attempt in (
        lambda: kv.check_prefilled(answer),
        lambda: kv.nixl_fetch(answer),
        lambda: kv.engine_id_of(answer, None),
    ):
        with pytest.raises(kv.TransferError):
            attempt()
    assert not kv.earlier_slices_evicted(answer, 10_000)


@pytest.mark.parametrize(
    ("read", "answer", "error"),
    [
        (kv.check_prefilled, b'{"choices":[{"finish_reason":"stop"}]}', "stopped early"),
        (kv.check_prefilled, b'{"choices":[]}', "stopped early"),
        (kv.nixl_fetch, MOONCAKE_ANSWER, "has no kv_transfer_params"),
        (kv.nixl_fetch, b'{"choices":[{"finish_reason":"length"}],"kv_transfer_params":[]}', "no completion"),
    ],
)
def test_answers_without_kv(read: Callable[[bytes], object], answer: bytes, error: str) -> None:
    with pytest.raises(kv.TransferError, match=error):
        read(answer)


def test_the_engine_id_is_the_ranks_own() -> None:
    answer = b'{"0":{"engine_id":"a","worker_addr":{}},"1":{"engine_id":"b","worker_addr":{"0":{"0":"tcp://h:1"}}}}'
    assert [kv.engine_id_of(answer, rank) for rank in (None, 0, 1)] == ["a", "a", "b"]
    with pytest.raises(kv.TransferError, match="not registered"):
        kv.engine_id_of(answer, 2)


@pytest.mark.parametrize(
    ("cached", "before", "short"), [(4096, 4096, False), (3840, 4096, False), (3839, 4096, True), (None, 4096, True)]
)
def test_a_shortfall_of_more_than_a_block_ends_slicing(cached: int | None, before: int, short: bool) -> None:
    answer = json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": cached}}}).encode()
    assert kv.earlier_slices_evicted(answer, before) is short


def test_nothing_is_concluded_from_an_engine_that_does_not_tell() -> None:
    assert not kv.earlier_slices_evicted(b'{"usage":{"prompt_tokens_details":null}}', 4096)
    assert not kv.earlier_slices_evicted(b"{}", 4096)
