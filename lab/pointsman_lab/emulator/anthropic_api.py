"""Anthropic's /v1/messages on the emulated engine: converts requests to chats; bodies and events of answers as in vLLM. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pointsman_gateway.core.api import ApiRequestError
from pointsman_gateway.core.api.anthropic_messages import Unconvertible, check_messages, to_chat
from pointsman_lab.emulator.openai_api import ApiError, GenerationParams, call_id
from pointsman_lab.emulator.scripted_answers import REASONING, Piece, ReadAnswer, ScriptedAnswer

# Fields that have the same name in a chat completions body.
SHARED = ("model", "stream", "max_tokens", "ignore_eos", "session_id", "cache_salt", "priority", "kv_transfer_params")
_DELTAS = {None: ("text_delta", "text"), REASONING: ("thinking_delta", "thinking")}  # otherwise a call's arguments
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"length": "max_tokens", "stop": "end_turn"}


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return the equivalent chat completions body. Raises ApiError."""
    try:
        check_messages(body)
        chat = to_chat(body)
    except ApiRequestError as error:
        raise ApiError(error.status, error.message, error.param) from error
    except Unconvertible as error:
        raise ApiError(400, f"the emulated engine does not support {error}", "messages") from error
    # vLLM accepts a tool choice without tools here.
    choice = _tool_choice(body.get("tool_choice")) if chat.get("tools") else "none"
    return {name: body[name] for name in SHARED if name in body} | chat | {"tool_choice": choice}


def _tool_choice(choice: Mapping[str, Any] | None) -> str | dict[str, Any]:
    kind = "auto" if choice is None else choice.get("type")
    if choice is not None and kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise ApiError(400, f"tool_choice.type must be auto, any, tool or none, not {kind!r}", "tool_choice.type")
    return _CHOICES[kind]


def error(refused: ApiError) -> dict[str, Any]:
    """Return the body of an error response."""
    return {"type": "error", "error": {"type": refused.body()["error"]["type"], "message": refused.message}}


def token_count(tokens: int) -> dict[str, Any]:
    """Return the body of an answer to count_tokens."""
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


def usage(used: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's counts under Anthropic's names."""
    cached = used["prompt_tokens_details"]["cached_tokens"]
    counts = {"input_tokens": used["prompt_tokens"] - cached, "output_tokens": used["completion_tokens"]}
    return counts | {"cache_read_input_tokens": cached}


def message(
    params: GenerationParams, request_id: str, read: ReadAnswer, reason: str, used: dict[str, Any]
) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    content: list[dict[str, Any]] = []
    if read.reasoning:
        content.append({"type": "thinking", "thinking": read.reasoning, "signature": request_id})
    if read.text or not (read.calls or content):
        content.append({"type": "text", "text": read.text})
    for number, (name, arguments) in enumerate(read.calls):
        given = json.loads(arguments) if reason == "stop" else {}
        content.append({"type": "tool_use", "id": call_id(request_id, number), "name": name, "input": given})
    stop_reason = "tool_use" if read.calls and reason == "stop" else _REASONS.get(reason)
    return _empty(params, request_id) | {"content": content, "stop_reason": stop_reason, "usage": usage(used)}


class MessageEvents:
    """The server-sent events of one streamed answer."""

    def __init__(self, params: GenerationParams, request_id: str, scripted: ScriptedAnswer | None) -> None:
        self._params, self._id, self._scripted = params, request_id, scripted
        self._index = -1  # of the open content block
        self._open: int | None = None  # the content of the open block, as in Piece.call
        self._called = False

    def start(self, prompt_tokens: int) -> bytes:
        """Return the event before the first text. vLLM reports cached tokens only at the end."""
        counts = {"input_tokens": prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=_empty(self._params, self._id) | {"usage": counts})

    def pieces(self, pieces: Sequence[Piece], reason: str) -> bytes:
        """Return the events of what was generated since the last call. Mutates."""
        del reason
        out = b""
        for call, text in pieces:
            if self._index < 0 or call != self._open:
                out += self._close() + self._begin(call)
            if text:
                kind, name = _DELTAS.get(call, ("input_json_delta", "partial_json"))
                out += self._delta({"type": kind, name: text})
        return out

    def _begin(self, call: int | None) -> bytes:
        self._index, self._open = self._index + 1, call
        block: dict[str, Any] = {"type": "text", "text": ""}
        if call == REASONING:
            block = {"type": "thinking", "thinking": ""}
        elif call is not None:
            assert self._scripted is not None
            self._called = True
            name = self._scripted.tool_calls[call].name
            block = {"type": "tool_use", "id": call_id(self._id, call), "name": name, "input": {}}
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._index < 0:
            return b""
        signed = self._open == REASONING
        signature = self._delta({"type": "signature_delta", "signature": self._id}) if signed else b""
        return signature + _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error after the answer has begun, which ends the stream."""
        return _event("error", error={"type": "api_error", "message": error.message})

    def end(self, used: dict[str, Any], reason: str) -> bytes:
        """Return the closing events, with the usage."""
        stop_reason = "tool_use" if self._called and reason == "stop" else _REASONS.get(reason)
        delta = {"stop_reason": stop_reason, "stop_sequence": None}
        return self._close() + _event("message_delta", delta=delta, usage=usage(used)) + _event("message_stop")


def _empty(params: GenerationParams, request_id: str) -> dict[str, Any]:
    head = {"id": request_id, "type": "message", "role": "assistant", "content": [], "model": params.model}
    return head | {"stop_reason": None, "stop_sequence": None}


def _event(name: str, /, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n".encode()
