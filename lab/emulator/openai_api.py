"""What an OpenAI request means to the emulated engine, and the bodies of its answers, shaped as vLLM's. Pure.

Beyond what is listed in `GenerationParams`, sampling parameters are accepted and ignored: the model's tokens are a function of
the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pointsman.lab.workload.tokenizer import ChatError, ChatTokenizer

# What vLLM generates for /v1/completions when max_tokens is not given.
COMPLETION_TOKENS = 16


class ApiError(Exception):
    """An answer that is an error. `status` is the HTTP status; `param` names the offending field."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """vLLM's ErrorResponse."""
        kinds = {400: "BadRequestError", 404: "NotFoundError"}
        kind = kinds.get(self.status, "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class GenerationParams:
    """A validated request. `prompt` are token ids; `kv_transfer` are kv_transfer_params or None."""

    chat: bool
    model: str
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    session_id: str
    cache_salt: str
    priority: int
    kv_transfer: Mapping[str, Any] | None


def parse_json(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises ApiError 400."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Raises ApiError 404 for a model that is not served; none given means the served one, as in vLLM."""
    if body.get("model") not in (None, "", served):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {served}."
        raise ApiError(404, message, "model")


def chat_tokens(body: Mapping[str, Any], tokenizer: ChatTokenizer) -> list[int]:
    """Token ids of a chat's prompt. Raises ApiError 400."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of at least one message", "messages")
    extra = body.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise ApiError(400, "chat_template_kwargs must be an object", "chat_template_kwargs")
    tools = body.get("tools")
    if not (tools is None or isinstance(tools, list)):
        raise ApiError(400, "tools must be a list", "tools")
    extra = {
        **extra,
        "add_generation_prompt": body.get("add_generation_prompt") is not False,
        "continue_final_message": body.get("continue_final_message") is True,
    }
    try:
        return tokenizer.encode(tokenizer.render(messages, tools, **extra))
    except ChatError as error:
        raise ApiError(400, str(error), "messages") from error


def completion_tokens(body: Mapping[str, Any], tokenizer: ChatTokenizer) -> list[int]:
    """Token ids of a completion's prompt: text, or token ids, or a list of one of either. Raises ApiError 400."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise ApiError(400, "prompt must be one text or one list of token ids", "prompt")
    if unknown := next((token for token in prompt if not tokenizer.known(token)), None):
        raise ApiError(400, f"Token id {unknown} is out of vocabulary", "prompt")
    return prompt


def parse_generation_params(
    body: Mapping[str, Any],
    session_header: str,
    *,
    chat: bool,
    served: str,
    tokenizer: ChatTokenizer,
    max_model_len: int,
) -> GenerationParams:
    """Validate a body of /v1/chat/completions (`chat`) or /v1/completions. Raises ApiError with vLLM's status and words."""
    check_model(body, served)
    prompt = chat_tokens(body, tokenizer) if chat else completion_tokens(body, tokenizer)
    if not prompt:
        raise ApiError(400, "The prompt is empty", "prompt")
    if body.get("n", 1) not in (None, 1):
        raise ApiError(400, "the emulated engine answers with n=1 only", "n")
    asked = body.get("max_completion_tokens") if chat else None
    asked = body.get("max_tokens") if asked is None else asked
    if asked is not None and type(asked) is not int:
        raise ApiError(400, "max_tokens must be an integer", "max_tokens")
    if asked is not None and asked < 1:
        raise ApiError(400, f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    room = max_model_len - len(prompt)
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    if room < 1:
        raise ApiError(
            400,
            f"{limit}your prompt contains {len(prompt)} input tokens, which exceeds this limit even without any output "
            "tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    if asked is not None and asked > room:
        raise ApiError(
            400,
            f"{limit}you requested {asked} output tokens and your prompt contains {len(prompt)} input tokens, for a total "
            f"of {asked + len(prompt)} tokens. Please reduce the length of the input prompt or the number of requested "
            "output tokens.",
            "input_tokens",
        )
    default = room if chat else min(room, COMPLETION_TOKENS)
    options = body.get("stream_options") or {}
    transfer = body.get("kv_transfer_params")
    if not isinstance(options, dict) or not (transfer is None or isinstance(transfer, dict)):
        raise ApiError(400, "stream_options and kv_transfer_params must be objects")
    priority = body.get("priority", 0)
    if type(priority) is not int:
        raise ApiError(400, "priority must be an integer", "priority")
    return GenerationParams(
        chat=chat,
        model=served,
        prompt=prompt,
        max_tokens=default if asked is None else asked,
        ignore_eos=body.get("ignore_eos") is True,
        stream=body.get("stream") is True,
        include_usage=options.get("include_usage") is True,
        session_id=str(body.get("session_id") or session_header),
        cache_salt=str(body.get("cache_salt") or ""),
        priority=priority,
        kv_transfer=transfer,
    )


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """vLLM's UsageInfo with --enable-prompt-tokens-details."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def answer(
    params: GenerationParams, request_id: str, created: int, text: str, reason: str, used: dict[str, Any]
) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    choice |= {"message": {"role": "assistant", "content": text, "tool_calls": []}} if params.chat else {"text": text}
    return {
        "id": request_id,
        "object": "chat.completion" if params.chat else "text_completion",
        "created": created,
        "model": params.model,
        "choices": [choice],
        "usage": used,
        "kv_transfer_params": None,
    }


class Chunks:
    """The server-sent events of one streamed answer."""

    def __init__(self, params: GenerationParams, request_id: str, created: int) -> None:
        self._chat = params.chat
        kind = "chat.completion.chunk" if params.chat else "text_completion"
        head = {"id": request_id, "object": kind, "created": created, "model": params.model}
        self._head = f"data: {json.dumps(head)[:-1]}, "

    def start(self) -> bytes:
        """What comes before the first text: the role of a chat's answer."""
        if not self._chat:
            return b""
        choice = '{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}'
        return f'{self._head}"choices": [{choice}]}}\n\n'.encode()

    def text(self, text: str, reason: str = "") -> bytes:
        """One piece of text, the last one with its finish reason."""
        body = f'"delta": {{"content": {json.dumps(text)}}}' if self._chat else f'"text": {json.dumps(text)}'
        finish = f'"{reason}"' if reason else "null"
        choice = f'{{"index": 0, {body}, "logprobs": null, "finish_reason": {finish}}}'
        return f'{self._head}"choices": [{choice}]}}\n\n'.encode()

    def failed(self, error: ApiError) -> bytes:
        """An error that comes when the answer has begun, and the end."""
        return f"data: {json.dumps(error.body())}\n\ndata: [DONE]\n\n".encode()

    def end(self, used: dict[str, Any] | None) -> bytes:
        """The usage chunk, when it was asked for, and the end."""
        tail = f'{self._head}"choices": [], "usage": {json.dumps(used)}}}\n\n' if used else ""
        return f"{tail}data: [DONE]\n\n".encode()
