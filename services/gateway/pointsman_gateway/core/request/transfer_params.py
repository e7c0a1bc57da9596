"""Builds the bodies of the two requests of a KV transfer (the prefill on P, the answer on D from P's KV), and reads P's answers.

Both engines must see the same prompt, or D would read KV of other tokens. So P gets the client's own body without the fields that
affect only the answer, or the prompt's tokens. D's request carries the KV transfer parameters only if no field was removed that
a chat template might show. Otherwise, and for answers whose first byte does not show that the transfer succeeded, a request like
P's pulls the KV into D's prefix cache. The client's own request then uses what is really its prefix.

To fetch a prefix that P has cached, both get its token ids alone. A truncated prompt at P beside the whole one at D must not be
sent: both connectors count blocks from the end of the prompt, so that D would read KV of other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from pointsman_gateway.core.api import ApiCall, Endpoint, chat_of, with_fields
from pointsman_gateway.core.json_object import json_value

MOONCAKE, NIXL = "MOONCAKE", "NIXL"
# Name in kv_transfer_params by which an engine with the connector package's cache policy knows the last request of a session
# (pointsman_connector.ended_first). Other connectors ignore it.
SESSION_END = "pointsman_session_end"
# The APIs whose requests have kv_transfer_params in vLLM.
_WITH_PARAMS = (Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.MESSAGES)
RELEASE_MODEL = "pointsman-kv-release"
# Number of just prefilled tokens that may be missing from the cache without an eviction, since engines keep only whole blocks.
SLACK_TOKENS = 256

# Fields that affect only the answer: its form, its end and what is reported of it. No chat template sees them.
_ANSWER_ONLY = (
    *("stream", "stream_options", "n", "best_of", "use_beam_search", "length_penalty", "echo", "suffix"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "allowed_token_ids", "bad_words", "logit_bias"),
    *("logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids", "return_prompt_text"),
)
# Fields that affect the answer, but that a template may show to the model (harmony does).
_MAYBE_IN_PROMPT = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


# The `kv_transfer_params` that a request carries.
Params: TypeAlias = Mapping[str, Any]


class TransferError(Exception):
    """A KV transfer failed, though no request to an instance did. The text contains no address."""


def transfer_obstacle(call: ApiCall) -> str:
    """Return why another instance cannot prefill the call's prompt; empty if it can."""
    if not _has_body(call) and (call.chat is None or call.previous_response_id):
        return "a prompt that only its own API can render"
    if call.body.get("prompt_embeds") is not None:
        return "prompt embeddings"
    if not call.reads_prefix_cache:
        return "prompt_logprobs recompute the prompt"
    return "several prompts" if call.prompts > 1 else ""


def supports_inline_kv_transfer(call: ApiCall) -> bool:
    """Whether the client's own request can carry KV transfer parameters: it has one streamed answer, and P's request omits no
    field that a template may show."""
    if not call.stream or call.endpoint not in (Endpoint.CHAT, Endpoint.COMPLETION):
        return False
    several = any(call.body.get(name) not in (None, 1) for name in ("n", "best_of")) or call.body.get("use_beam_search")
    hidden = any(call.body.get(name) is not None for name in _MAYBE_IN_PROMPT)
    return not several and not hidden and not transfer_obstacle(call)


def prefill_request(call: ApiCall, params: Params, ids: Sequence[int] | None = None) -> tuple[str, bytes]:
    """Return path and body of a request that computes the KV of the call's prompt: one output token, not streamed. The call has
    no transfer_obstacle(). It may have dropped its values, so the prompt is that of its payload. `ids`: of the whole prompt, if
    they are known; engines convert other APIs' requests by rules of their own, and refuse some of the chats without these."""
    if ids and not _has_body(call):
        return prefix_request(call, list(ids), params)
    if _has_body(call):
        endpoint, said = call.endpoint, msgspec.json.decode(call.payload, type=dict[str, msgspec.Raw])
    else:
        endpoint, said = Endpoint.CHAT, chat_of(call.endpoint, call.payload)
    body: dict[str, Any] = {name: value for name, value in said.items() if name not in _ANSWER_ONLY + _MAYBE_IN_PROMPT}
    limit = "max_completion_tokens" if endpoint is Endpoint.CHAT else "max_tokens"
    # ignore_eos: a first token that ends the answer would end P's request without KV to send.
    body |= {"model": call.model, "stream": False, limit: 1, "n": 1, "ignore_eos": True}
    if call.cache_salt:
        body["cache_salt"] = call.cache_salt
    return endpoint.value, msgspec.json.encode(body | {"kv_transfer_params": params})


def prefix_request(call: ApiCall, ids: Sequence[int], params: Params | None = None) -> tuple[str, bytes]:
    """Return path and body of a request that puts a prompt's first tokens into an instance's own prefix cache; with the transfer
    parameters `params`, one of the two requests that pass them on from another instance's."""
    body: dict[str, Any] = {"model": call.model, "prompt": ids, "max_tokens": 1, "stream": False, "temperature": 0}
    body["ignore_eos"] = True  # as in prefill_request
    if call.cache_salt:
        body["cache_salt"] = call.cache_salt
    if params is not None:
        body["kv_transfer_params"] = params
    return Endpoint.COMPLETION.value, msgspec.json.encode(body)


def with_session_end(endpoint: Endpoint, payload: bytes) -> bytes:
    """Return the body of a session's last request, without transfer parameters, marked as such; unchanged if the API has no field
    for the mark."""
    return with_fields(payload, {"kv_transfer_params": {SESSION_END: True}}) if endpoint in _WITH_PARAMS else payload


def nixl_fetch(answer: bytes) -> Params:
    """Return the parameters, from P's `answer`, that make D fetch the KV that P keeps. Raises TransferError if P keeps none."""
    prefilled = check_prefilled(answer)
    if not prefilled.kv_transfer_params:
        raise TransferError("the prefill's answer has no kv_transfer_params")
    return prefilled.kv_transfer_params


def check_prefilled(answer: bytes) -> PrefillResponse:
    """Parse P's answer to a prefill. Raises TransferError unless it shows that P computed the whole prompt and keeps its KV."""
    if (prefilled := json_value(answer, PrefillResponse)) is None:
        raise TransferError("the prefill's answer is no completion")
    if not prefilled.choices or prefilled.choices[0].finish_reason != "length":
        raise TransferError("the prefill stopped early")
    return prefilled


def release_request(transfer: Params) -> tuple[str, bytes]:
    """Return path and body of a KV release: a request that no engine accepts. vLLM's API server notifies the connector of
    requests that it refuses, and the connector makes the other engine free the transfer's KV
    (_with_kv_transfer_rejection_cleanup)."""
    body = {"model": RELEASE_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": transfer}
    return Endpoint.COMPLETION.value, msgspec.json.encode(body)


def engine_id_of(answer: bytes, rank: int | None) -> str:
    """Return the engine id from a bootstrap server's answer to /query. Raises TransferError if the rank is not registered."""
    if (ranks := json_value(answer, dict[str, _Registered])) is None:
        raise TransferError("the bootstrap server's answer cannot be parsed")
    registered = ranks.get(str(rank or 0))
    if registered is None or not registered.engine_id:
        raise TransferError("the engine is not registered with its bootstrap server")
    return registered.engine_id


def earlier_slices_evicted(answer: bytes, prefilled_before: int) -> bool:
    """Whether the answer to a slice shows that the slices before it are no longer in the cache."""
    prefilled = json_value(answer, PrefillResponse)
    details = prefilled.usage.prompt_tokens_details if prefilled and prefilled.usage else None
    return details is not None and (details.cached_tokens or 0) + SLACK_TOKENS < prefilled_before


def _has_body(call: ApiCall) -> bool:
    """Return whether engines render the call's own body, and not the chat that it is converted to."""
    return call.endpoint in (Endpoint.CHAT, Endpoint.COMPLETION)


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class PrefillResponse(msgspec.Struct):
    """The fields that are read from the answer to a prefill or slice."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Registered(msgspec.Struct):
    engine_id: str = ""
