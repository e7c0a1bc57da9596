"""Continues an answer that another engine has begun, as if this engine had generated it from its beginning.

A request with `vllm_xargs: {"pointsman_answer": RECORD}` has the answer record (answer_record.py) of an engine that is gone. The
engine core gets it as a part of the prompt, and computes what follows. The API server passes its ids through the detokenizer and
through vLLM's own parsers (reasoning, tool calls) in the same pieces as the first engine did, and sends nothing of that: the
client has it. So the stream goes on with the next token, and the usage at its end is that of the whole answer.

What the engine core computes from the output so far begins anew: random numbers of a seed, presence and frequency penalties,
grammars, limits of thinking. The gateway does not continue such answers.

`register` replaces methods of vLLM's API server: OutputProcessor.add_request, both ways to take an output from a
RequestOutputCollector, and the generators of streams (chat, completions, Messages, Responses). A request without the field passes
through vLLM's own code alone.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from pointsman_connector.answer_record import FIELD, asked, read
from pointsman_connector.recorded_streams import (
    REPLAYED,
    UNRECORDED,
    ItemIds,
    generation_error,
    naming_calls,
    telling,
    telling_converted,
    telling_response_events,
    telling_responses,
)

# Attributes of a RequestOutputCollector.
_REPLAY, _READY, _UNRECORDED = "pointsman_replay", "pointsman_ready", "pointsman_unrecorded"


def register() -> None:
    """Replace vLLM's methods in this API server, once. Raises ImportError and AttributeError if this vLLM has others."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses import api_router, streaming_events
    from vllm.entrypoints.openai.responses import serving as responses_serving
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    if hasattr(OutputProcessor.add_request, "__wrapped__"):
        return
    added = _continuing(OutputProcessor.add_request)
    taken, taken_now = _after_replay(RequestOutputCollector.get), _now_after_replay(RequestOutputCollector.get_nowait)
    chat = telling(
        OpenAIServingChat.chat_completion_stream_generator, hold_first=True, converted=AnthropicServingMessages
    )
    messages = telling_converted(AnthropicServingMessages.message_stream_converter)
    completion = telling(OpenAIServingCompletion.completion_stream_generator, hold_first=False)
    ids = ItemIds(streaming_events.random_uuid)
    responses = telling_responses(responses_serving.OpenAIServingResponses.responses_stream_generator, ids)
    response_events = telling_response_events(api_router._convert_stream_to_sse_events)
    call_opened = naming_calls(streaming_events.SimpleStreamingEventProcessor.open, ids)
    generation_error()
    call_ids = _names_of_call_ids()
    # Nothing is replaced unless all of it can be.
    OutputProcessor.add_request = added
    RequestOutputCollector.get, RequestOutputCollector.get_nowait = taken, taken_now
    OpenAIServingChat.chat_completion_stream_generator = chat
    OpenAIServingCompletion.completion_stream_generator = completion
    AnthropicServingMessages.message_stream_converter = messages
    responses_serving.OpenAIServingResponses.responses_stream_generator = responses
    api_router._convert_stream_to_sse_events = response_events
    streaming_events.SimpleStreamingEventProcessor.open = call_opened
    streaming_events.random_uuid = responses_serving.random_uuid = call_ids["random_uuid"] = ids


def _names_of_call_ids() -> dict[str, Any]:
    """Return the names of the module that makes the ids of tool calls. Raises ImportError and AttributeError as register does."""
    try:
        from vllm.renderers.chat_utils import make_tool_call_id  # a package in vLLM 0.33
    except ImportError:
        from vllm.entrypoints.chat_utils import make_tool_call_id  # up to 0.31
    names: dict[str, Any] = make_tool_call_id.__globals__
    if "random_uuid" not in names:
        raise AttributeError(f"{make_tool_call_id.__module__} has no random_uuid")
    return names


# ---- the answer so far, before the engine's own outputs ----


def _continuing(add_request: Any) -> Any:
    """Return OutputProcessor.add_request such that an answer record is replayed, and the engine core gets it in the prompt."""

    from vllm.v1.engine import FinishReason

    @functools.wraps(add_request)
    def add(
        self: Any, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> Any:
        params = request.sampling_params
        record = asked(params.extra_args) if params is not None else None
        if record is None:
            return add_request(self, request, prompt, parent_req, request_index, queue)
        pieces, complete = read(record)
        ids = [token_id for piece in pieces for token_id in piece]
        rest = {name: value for name, value in params.extra_args.items() if name != FIELD}
        request.sampling_params = params = params.clone()
        params.extra_args = rest or None
        cannot = parent_req is not None or queue is None or _begins_anew(request, params)
        if not record.strip(":"):
            if cannot and queue is not None:
                setattr(queue, _UNRECORDED, True)
            return add_request(self, request, prompt, parent_req, request_index, queue)
        left = (params.max_tokens or 0) - len(ids)
        if cannot or (left <= 0 and not complete):
            raise ValueError("this answer cannot be continued")
        # With the parameters of the whole answer: the detokenizer holds as much text back as the first engine's did.
        added = add_request(self, request, prompt, parent_req, request_index, queue)
        state = self.request_states[request.request_id]
        if complete:
            # Only the usage and the stream's end are missing, for which the engine core has nothing to do.
            *pieces, last = pieces or [[]]
            # As the engine core decides, in its order.
            stopped = bool(last) and last[-1] in (params.eos_token_id, *(params.stop_token_ids or ()))
            reason = FinishReason.STOP if stopped or left > 0 else FinishReason.LENGTH
            outputs = [*_replayed(state, pieces), *_replayed(state, [last], reason, stopped=stopped)]
            setattr(queue, _READY, deque(outputs))
            self._finish_request(state)
            request.abort_immediately = True
            return added
        setattr(queue, _REPLAY, _replayed(state, pieces))
        # The state keeps the list of the client's prompt; the engine core gets a new one.
        request.prompt_token_ids = [*request.prompt_token_ids, *ids]
        request.sampling_params = params = params.clone()
        params.max_tokens, params.min_tokens = left, max(params.min_tokens - len(ids), 0)
        return added

    return add


def _replayed(state: Any, pieces: list[list[int]], finish_reason: Any = None, *, stopped: bool = False) -> list[Any]:
    """Return the RequestOutputs of outputs with these ids, as the first engine's API server made them. `stopped`: the last id is
    a stop token, whose text the detokenizer leaves out."""
    outputs = []
    # The other engine may have put out more or fewer tokens at a time than this one does.
    interval, state.stream_interval = state.stream_interval, 1
    for piece in pieces:
        stop = state.detokenizer.update(piece, stopped)
        output = state.make_request_output(piece, None, finish_reason, stop)
        if output is not None:
            setattr(output, REPLAYED, True)
            outputs.append(output)
    state.stream_interval, state.sent_tokens_offset = interval, state.detokenizer.num_output_tokens()
    return outputs


def _begins_anew(request: Any, params: Any) -> bool:
    """Return whether the rest of an answer depends on more than its tokens, also by the engine's own defaults."""
    return bool(
        request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or params.structured_outputs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.thinking_token_budget is not None
        or params.logprobs is not None
    )


def _ready(collector: Any, output: Any) -> Any:
    """Return the first output to take: that of the replay, which waits for the first output of the engine and takes over how much
    of the prompt that one found in the cache."""
    if _UNRECORDED in collector.__dict__:
        setattr(output, UNRECORDED, True)
    replay = collector.__dict__.pop(_REPLAY, None)
    if not replay:
        return output
    cached = getattr(output, "num_cached_tokens", None)
    if cached is not None:
        cached = output.num_cached_tokens = min(cached, len(output.prompt_token_ids))
    for replayed in replay:
        replayed.num_cached_tokens = cached
    ready = deque([*replay, output])
    first = ready.popleft()
    setattr(collector, _READY, ready)
    return first


def _after_replay(get: Any) -> Any:
    @functools.wraps(get)
    async def replaying(self: Any) -> Any:
        return _ready(self, await get(self))

    return replaying


def _now_after_replay(get_nowait: Any) -> Any:
    @functools.wraps(get_nowait)
    def replaying(self: Any) -> Any:
        if ready := self.__dict__.get(_READY):
            return ready.popleft()
        output = get_nowait(self)
        return output if output is None else _ready(self, output)

    return replaying
