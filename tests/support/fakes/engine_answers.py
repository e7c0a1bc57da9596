"""A scripted engine's answers on each API, in the format of vLLM's own answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pointsman_gateway.core.api import Endpoint

MODEL = "tiny"


@dataclass(frozen=True)
class Script:
    """One answer: `words` after a prompt of `prompt` tokens, of which `cached` were cached."""

    kind: Endpoint
    body: dict[str, Any]
    words: tuple[str, ...]
    prompt: int
    cached: int = 16

    def whole(self) -> dict[str, Any]:
        """Return the answer as one object."""
        text = "".join(self.words)
        match self.kind:
            case Endpoint.MESSAGES:
                content = [{"type": "text", "text": text}]
                return self._message() | {"content": content, "stop_reason": "end_turn", "usage": self._usage()}
            case Endpoint.RESPONSES:
                return self._response("completed") | {"output": [self._item(text)], "usage": self._usage()}
            case Endpoint.EMBEDDINGS:
                datum = {"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}
                return {"object": "list", "data": [datum], "model": MODEL, "usage": self._usage()}
            case Endpoint.POOLING:
                datum = {"object": "pooling", "index": 0, "data": [0.5, -0.5]}
                return {"id": "pooling-1", "object": "list", "data": [datum], "model": MODEL, "usage": self._usage()}
            case Endpoint.CLASSIFY:
                datum = {"index": 0, "label": "LABEL_0", "probs": [0.75, 0.25], "num_classes": 2}
                return {"id": "classify-1", "object": "list", "data": [datum], "model": MODEL, "usage": self._usage()}
            case Endpoint.RERANK:
                results = [{"index": 0, "document": {"text": "a"}, "relevance_score": 0.5}]
                return {"id": "rerank-1", "model": MODEL, "usage": self._usage(), "results": results}
            case Endpoint.SCORE:
                data = [{"index": 0, "object": "score", "score": 0.5}]
                return {"id": "embd-1", "object": "list", "data": data, "model": MODEL, "usage": self._usage()}
        reason = "length" if self.body.get("ignore_eos") else "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": text}} if self.kind is Endpoint.CHAT else {"text": text}
        head = {"id": "x", "object": "o", "created": 0, "model": MODEL}
        return head | {"choices": [choice], "usage": self._usage()}

    def events(self) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Return the answer as events: those before the first word, one per word, those after the last word."""
        if self.kind is Endpoint.MESSAGES:
            return self._message_events()
        if self.kind is Endpoint.RESPONSES:
            return self._response_events()
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": MODEL}

        def event(data: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps(head | data).encode() + b"\n\n"

        deltas = [{"index": 0, "delta": {"content": word}, "text": word, "finish_reason": None} for word in self.words]
        deltas[-1:] = [last | {"finish_reason": "stop"} for last in deltas[-1:]]
        asked = (self.body.get("stream_options") or {}).get("include_usage")
        usage = [event({"choices": [], "usage": self._usage()})] if asked else []
        return [], [event({"choices": [delta]}) for delta in deltas], [*usage, b"data: [DONE]\n\n"]

    def _usage(self) -> dict[str, Any]:
        output = len(self.words)
        match self.kind:
            case Endpoint.MESSAGES:
                fresh = {"input_tokens": self.prompt - self.cached, "output_tokens": output}
                return fresh | {"cache_read_input_tokens": self.cached}
            case Endpoint.RESPONSES:
                counts = {"input_tokens": self.prompt, "output_tokens": output, "total_tokens": self.prompt + output}
                details = {"input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0}}
                return counts | details | {"output_tokens_details": {"reasoning_tokens": 0}}
        if self.kind.generates:
            counts = {"prompt_tokens": self.prompt, "completion_tokens": output}
            return counts | {
                "total_tokens": self.prompt + output,
                "prompt_tokens_details": {"cached_tokens": self.cached},
            }
        return {"prompt_tokens": self.prompt, "total_tokens": self.prompt}

    def _message(self) -> dict[str, Any]:
        head = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": MODEL}
        return head | {"stop_reason": None, "stop_sequence": None}

    def _message_events(self) -> tuple[list[bytes], list[bytes], list[bytes]]:
        started = self._message() | {"usage": {"input_tokens": self.prompt, "output_tokens": 0}}
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        before = [_named("message_start", {"message": started}), _named("content_block_start", block)]
        words = [
            _named("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": word}})
            for word in self.words
        ]
        end = {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": self._usage()}
        after = [_named("content_block_stop", {"index": 0}), _named("message_delta", end), _named("message_stop", {})]
        return before, words, after

    def _response(self, status: str) -> dict[str, Any]:
        head = {"id": self.body.get("request_id", "resp_own"), "object": "response", "created_at": 0, "model": MODEL}
        rest = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0}
        repeated = {"instructions": self.body.get("instructions"), "metadata": self.body.get("metadata")}
        return head | rest | {"output": [], "status": status} | repeated

    @staticmethod
    def _item(text: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}

    def _response_events(self) -> tuple[list[bytes], list[bytes], list[bytes]]:
        at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": self._response("in_progress")}),
            ("response.output_item.added", {"output_index": 0, "item": self._item("") | {"content": []}}),
            ("response.content_part.added", {**at, "part": part}),
            *(("response.output_text.delta", {**at, "delta": word, "logprobs": []}) for word in self.words),
            ("response.completed", {"response": self.whole()}),
        ]
        written = [_numbered(name, number, data) for number, (name, data) in enumerate(events)]
        return written[:3], written[3:-1], written[-1:]


def _named(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode()


def _numbered(name: str, number: int, data: dict[str, Any]) -> bytes:
    """Return an event of the Responses API. The type comes last, as in vLLM."""
    return f"event: {name}\ndata: {json.dumps({**data, 'sequence_number': number, 'type': name})}\n\n".encode()
