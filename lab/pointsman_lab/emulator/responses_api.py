"""OpenAI's /v1/responses on the emulated engine: converts requests to chats; bodies and events of answers as in vLLM. Pure.

Nothing is stored: a response cannot be retrieved or continued by its id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pointsman_gateway.core.api import ApiRequestError
from pointsman_gateway.core.api.anthropic_messages import Unconvertible
from pointsman_gateway.core.api.openai_responses import check_responses, to_chat
from pointsman_lab.emulator.anthropic_api import SHARED
from pointsman_lab.emulator.openai_api import ApiError, GenerationParams
from pointsman_lab.emulator.responses_tools import CalledTools, chat_tool_choice
from pointsman_lab.emulator.scripted_answers import REASONING, Piece, ReadAnswer, ScriptedAnswer

# Fields of the request that an answer repeats, with their defaults.
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "reasoning": None,
    "service_tier": "auto",
    "temperature": 1.0,
    "text": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return the equivalent chat completions body. Raises ApiError."""
    try:
        check_responses(body)
        chat = to_chat(body)
    except ApiRequestError as error:
        raise ApiError(error.status, error.message, error.param) from error
    except Unconvertible as error:
        raise ApiError(400, f"the emulated engine does not support {error}", "input") from error
    chat |= {"max_tokens": body.get("max_output_tokens"), "tool_choice": chat_tool_choice(body, chat.get("tools"))}
    return {name: body[name] for name in SHARED if name in body} | chat


def usage(used: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a chat under this API's names."""
    counts = {"input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
    details = {"cached_tokens": used["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0}
    counts |= {"total_tokens": used["total_tokens"], "input_tokens_details": details}
    return counts | {"output_tokens_details": {"reasoning_tokens": 0}}


def response(
    asked: Mapping[str, Any],
    params: GenerationParams,
    request_id: str,
    created: int,
    read: ReadAnswer,
    reason: str,
    used: dict[str, Any],
) -> dict[str, Any]:
    """Return the body of an answer to `asked` that is not streamed."""
    tools = CalledTools(asked.get("tools"))
    items = [_reasoning_item(request_id, read.reasoning)] if read.reasoning else []
    items += [_text_item(request_id, read.text)] if read.text or not (read.calls or items) else []
    items += [tools.item(request_id, number, name, given) for number, (name, given) in enumerate(read.calls)]
    status = "incomplete" if reason == "length" else "completed"
    return _response(asked, params, request_id, created, status, items, usage(used))


class ResponseEvents:
    """The server-sent events of one streamed answer."""

    def __init__(
        self,
        asked: Mapping[str, Any],
        params: GenerationParams,
        request_id: str,
        created: int,
        scripted: ScriptedAnswer | None,
    ) -> None:
        self._asked, self._params, self._id, self._created = asked, params, request_id, created
        self._scripted, self._tools = scripted, CalledTools(asked.get("tools"))
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: int | None = None  # the content of the last item, as in Piece.call
        self._text = ""

    def start(self, prompt_tokens: int) -> bytes:
        """Return the events before the first text. Mutates."""
        del prompt_tokens
        begun = _response(self._asked, self._params, self._id, self._created, "in_progress", [], None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def pieces(self, pieces: Sequence[Piece], reason: str) -> bytes:
        """Return the events of what was generated since the last call. Mutates."""
        del reason
        out = b""
        for call, text in pieces:
            if not self._items or call != self._open:
                out += self._close() + self._begin(call)
            self._text += text
            at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "delta": text}
            if text and call is None:
                out += self._event("response.output_text.delta", **at, content_index=0, logprobs=[])
            elif text and call == REASONING:
                out += self._event("response.reasoning_text.delta", **at, content_index=0)
            elif text and call is not None and not self._tools.is_custom(self._called(call)):
                out += self._event("response.function_call_arguments.delta", **at)
        return out

    def _begin(self, call: int | None) -> bytes:
        self._open, self._text = call, ""
        item = self._item()
        item |= {"status": "in_progress"} if "status" in item else {}
        self._items.append(item)
        at = {"output_index": len(self._items) - 1}
        if "content" not in item:
            return self._event("response.output_item.added", **at, item=item)
        part = item["content"][0]
        out = self._event("response.output_item.added", **at, item=item | {"content": []})
        return out + self._event("response.content_part.added", **at, item_id=item["id"], content_index=0, part=part)

    def _close(self) -> bytes:
        """Return the events that close the open item. Mutates."""
        if not self._items:
            return b""
        item = self._items[-1] = self._item()
        at: dict[str, Any] = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if item["type"] == "function_call":
            out = self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=self._text)
        elif item["type"] == "custom_tool_call":
            # Sent as a whole, because the text is not readable while its JSON is incomplete.
            out = self._event("response.custom_tool_call_input.delta", **at, delta=item["input"])
            out += self._event("response.custom_tool_call_input.done", **at, input=item["input"])
        else:
            at["content_index"] = 0
            out = (
                self._event("response.output_text.done", **at, text=self._text, logprobs=[])
                if self._open is None
                else self._event("response.reasoning_text.done", **at, text=self._text)
            )
            out += self._event("response.content_part.done", **at, part=item["content"][0])
        return out + self._event("response.output_item.done", output_index=at["output_index"], item=item)

    def _item(self) -> dict[str, Any]:
        if self._open is None:
            return _text_item(self._id, self._text)
        if self._open == REASONING:
            return _reasoning_item(self._id, self._text)
        return self._tools.item(self._id, self._open, self._called(self._open), self._text)

    def _called(self, call: int) -> str:
        assert self._scripted is not None
        return self._scripted.tool_calls[call].name

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error after the answer has begun, which ends the stream."""
        return self._event("error", code="server_error", message=error.message, param=None)

    def end(self, used: dict[str, Any], reason: str) -> bytes:
        """Return the events of the whole answer and the end, also for an incomplete answer. Mutates."""
        out = self._close()
        status = "incomplete" if reason == "length" else "completed"
        whole = _response(self._asked, self._params, self._id, self._created, status, self._items, usage(used))
        return out + self._event("response.completed", response=whole)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = {**fields, "sequence_number": self._number, "type": name}
        self._number += 1
        return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def _response(
    asked: Mapping[str, Any],
    params: GenerationParams,
    request_id: str,
    created: int,
    status: str,
    items: Sequence[dict[str, Any]],
    used: dict[str, Any] | None,
) -> dict[str, Any]:
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    head = {"id": request_id, "object": "response", "created_at": created, "model": params.model, "status": status}
    echo = {name: default if asked.get(name) is None else asked[name] for name, default in _ECHOED.items()}
    rest = {"background": False, "max_output_tokens": params.max_tokens, "previous_response_id": None}
    return head | echo | rest | {"incomplete_details": details, "output": list(items), "usage": used}


def _text_item(request_id: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "status": "completed"}
    return head | {"content": [part]}


def _reasoning_item(request_id: str, text: str) -> dict[str, Any]:
    head = {"id": f"rs_{request_id}", "type": "reasoning", "status": "completed", "summary": []}
    return head | {"content": [{"type": "reasoning_text", "text": text}]}
