"""Parses OpenAI requests for the emulated engine, and makes the bodies of its answers, as in vLLM. Pure.

Sampling parameters other than those in `GenerationParams` are accepted and ignored, because the model's tokens are a function of
the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pointsman_lab.emulator.answer_records import BegunAnswer, begun_answer
from pointsman_lab.emulator.scripted_answers import REASONING, Piece, ReadAnswer, ScriptedAnswer
from pointsman_lab.emulator.tool_choice import ToolChoice
from pointsman_lab.workload.tokenizer import ChatError, ChatTokenizer

# vLLM's default of max_tokens for /v1/completions, tokens.
COMPLETION_TOKENS = 16


class ApiError(Exception):
    """An error response. `status` is the HTTP status; `param` names the offending field."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return vLLM's ErrorResponse."""
        kinds = {400: "BadRequestError", 404: "NotFoundError"}
        kind = kinds.get(self.status, "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class GenerationParams:
    """A validated request."""

    chat: bool  # False: of /v1/completions
    model: str  # the served name, also if the body names none
    prompt: list[int]  # token ids
    max_tokens: int  # of the whole answer, its begun part included; at most what the prompt leaves
    ignore_eos: bool  # no end before max_tokens; a prepared answer ends all the same
    stream: bool  # the answer is sent as server-sent events
    include_usage: bool  # the stream ends with a chunk of usage
    session_id: str  # the body's session_id, else the X-Session-ID header; empty: none
    cache_salt: str  # prompts with other salts share no blocks; empty: none
    priority: int  # smaller is more urgent, as in EngineRequest
    kv_transfer: Mapping[str, Any] | None  # its kv_transfer_params; None: none
    tool_choice: ToolChoice  # of a completion: none
    begun: BegunAnswer | None = None  # the answer that the request continues; None: its stream tells no ids


def parse_json(raw: bytes) -> dict[str, Any]:
    """Return the request's JSON object. Raises ApiError 400."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Raise ApiError 404 for a model that is not served. As in vLLM, a missing name means the served model."""
    if body.get("model") not in (None, "", served):
        message = f"The model `{body['model']}` does not exist. Valid aliases: {served}."
        raise ApiError(404, message, "model")


def chat_tokens(body: Mapping[str, Any], tokenizer: ChatTokenizer) -> list[int]:
    """Return the token ids of a chat's prompt. Raises ApiError 400."""
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
    """Return the token ids of a completion's prompt: a text, token ids, or a list of one of either. Raises ApiError 400."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise ApiError(400, "prompt must be one text or one list of token ids", "prompt")
    if prompt and (min(prompt) < 0 or max(prompt) >= tokenizer.size):
        unknown = next(token for token in prompt if not 0 <= token < tokenizer.size)
        raise ApiError(400, f"Token id {unknown} is out of vocabulary", "prompt")
    return prompt


def parse_tool_choice(body: Mapping[str, Any]) -> ToolChoice:
    """Return the tool choice of a chat completions body whose types chat_tokens() has checked. Raises ApiError 400 with the
    messages of vLLM's ChatCompletionRequest.check_tool_usage."""
    tools, chosen = body.get("tools"), body.get("tool_choice")
    names = [tool["function"].get("name") for tool in tools or []]
    if not all(isinstance(name, str) for name in names):
        raise ApiError(400, "every tool must be a function with a name", "tools")
    if chosen == "none":
        return ToolChoice("none")
    if tools == []:
        message = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        raise ApiError(400, message, "tools")
    if chosen is None:
        return ToolChoice("auto" if tools else "none")
    if tools is None:
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", "tool_choice")
    if chosen == "auto" or chosen == "required":
        return ToolChoice(chosen)
    if not isinstance(chosen, dict):
        message = (
            f'Invalid value for `tool_choice`: {chosen}! Only named tools, "none", "auto" or "required" are supported.'
        )
        raise ApiError(400, message, "tool_choice")
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    function = chosen.get("function")
    if not isinstance(function, dict):
        message = f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}"
        raise ApiError(400, message, "tool_choice.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ApiError(
            400, f"Expected field `name` in `function` in `tool_choice`! {usage}", "tool_choice.function.name"
        )
    if name not in names:
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise ApiError(400, message, "tool_choice")
    return ToolChoice("named", name)


def parse_generation_params(
    body: Mapping[str, Any],
    session_header: str,
    *,
    chat: bool,
    served: str,
    tokenizer: ChatTokenizer,
    max_model_len: int,
) -> GenerationParams:
    """Validate a body of /v1/chat/completions (`chat`) or /v1/completions. Raises ApiError with vLLM's statuses and messages."""
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
    choice = parse_tool_choice(body) if chat else ToolChoice()
    room = max_model_len - len(prompt)
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    if room < 1:
        raise ApiError(
            400,
            f"{limit}your prompt contains {len(prompt)} input tokens, which exceeds this limit even without any output "
            "tokens. Please reduce the length of the input prompt.",
            "input_tokens",
        )
    if asked is not None and asked > max_model_len:
        message = f"max_tokens={asked} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens."
        raise ApiError(400, message, "max_tokens")
    default = room if chat else min(room, COMPLETION_TOKENS)
    options = body.get("stream_options") or {}
    transfer = body.get("kv_transfer_params")
    if not isinstance(options, dict) or not (transfer is None or isinstance(transfer, dict)):
        raise ApiError(400, "stream_options and kv_transfer_params must be objects")
    try:
        begun = begun_answer(body)
    except ValueError as error:
        raise ApiError(400, str(error), "vllm_xargs") from error
    priority = body.get("priority", 0)
    if type(priority) is not int:
        raise ApiError(400, "priority must be an integer", "priority")
    return GenerationParams(
        chat=chat,
        model=served,
        prompt=prompt,
        # At most the rest of the context, as in vLLM's get_max_tokens().
        max_tokens=default if asked is None else min(asked, room),
        ignore_eos=body.get("ignore_eos") is True,
        stream=body.get("stream") is True,
        include_usage=options.get("include_usage") is True,
        session_id=str(body.get("session_id") or session_header),
        cache_salt=str(body.get("cache_salt") or ""),
        priority=priority,
        kv_transfer=transfer,
        tool_choice=choice,
        begun=begun,
    )


def rendered(params: GenerationParams, request_id: str) -> dict[str, Any]:
    """Return what `/render` answers for a prompt: the fields of vLLM's GenerateRequest that the request determines."""
    sampling = {"max_tokens": params.max_tokens, "ignore_eos": params.ignore_eos}
    return {
        "request_id": request_id,
        "token_ids": params.prompt,
        "features": None,
        "sampling_params": sampling,
        "model": params.model,
        "stream": params.stream,
        "cache_salt": params.cache_salt or None,
        "priority": params.priority,
        "kv_transfer_params": params.kv_transfer,
    }


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Return vLLM's UsageInfo with --enable-prompt-tokens-details."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def finish_reason(params: GenerationParams, called: bool, reason: str) -> str:
    """Return a chat's finish reason. As in vLLM and at OpenAI, it is not "tool_calls" after a call of a named function."""
    return "tool_calls" if called and reason == "stop" and params.tool_choice.mode != "named" else reason


def call_id(request_id: str, number: int) -> str:
    """Return the id of an answer's tool call."""
    return f"call_{request_id[-16:]}_{number}"


def answer(
    params: GenerationParams, request_id: str, created: int, read: ReadAnswer, reason: str, used: dict[str, Any]
) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    reason = finish_reason(params, bool(read.calls), reason)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    calls = [
        {"id": call_id(request_id, at), "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(read.calls)
    ]
    content = None if calls and not (read.text or params.tool_choice.forced) else read.text
    choice |= (
        {"message": {"role": "assistant", "content": content, "reasoning": read.reasoning or None, "tool_calls": calls}}
        if params.chat
        else {"text": read.text}
    )
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

    def __init__(
        self, params: GenerationParams, request_id: str, created: int, scripted: ScriptedAnswer | None
    ) -> None:
        self._params = params
        self._id = request_id
        self._scripted = scripted
        self._called: set[int] = set()
        kind = "chat.completion.chunk" if params.chat else "text_completion"
        head = {"id": request_id, "object": kind, "created": created, "model": params.model}
        self._head = f"data: {json.dumps(head)[:-1]}, "

    def start(self, prompt_tokens: int) -> bytes:
        """Return the event before the first text: the role of a chat's answer."""
        del prompt_tokens
        if not self._params.chat:
            return b""
        choice = '{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}'
        return f'{self._head}"choices": [{choice}]}}\n\n'.encode()

    def pieces(self, pieces: Sequence[Piece], reason: str) -> bytes:
        """Return the events of what was generated since the last call; the last call has the finish reason. Mutates."""
        if self._scripted is None:
            return self.text("".join(piece.text for piece in pieces), reason)
        out = b"".join(self._piece(call, text) for call, text in pieces)
        return out + self.text("", finish_reason(self._params, bool(self._called), reason)) if reason else out

    def _piece(self, call: int | None, text: str) -> bytes:
        if call is None:
            return self.text(text)
        return self._delta({"reasoning": text}) if call == REASONING else self._call(call, text)

    def _call(self, number: int, arguments: str) -> bytes:
        assert self._scripted is not None
        call: dict[str, Any] = {"index": number, "function": {"arguments": arguments}}
        if number not in self._called:
            self._called.add(number)
            call |= {"id": call_id(self._id, number), "type": "function"}
            call["function"] = {"name": self._scripted.tool_calls[number].name, "arguments": arguments}
        return self._delta({"tool_calls": [call]})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return f'{self._head}"choices": [{json.dumps(choice)}]}}\n\n'.encode()

    def text(self, text: str, reason: str = "") -> bytes:
        """Return the event of a piece of text; the last one has the finish reason."""
        body = f'"delta": {{"content": {json.dumps(text)}}}' if self._params.chat else f'"text": {json.dumps(text)}'
        finish = f'"{reason}"' if reason else "null"
        choice = f'{{"index": 0, {body}, "logprobs": null, "finish_reason": {finish}}}'
        return f'{self._head}"choices": [{choice}]}}\n\n'.encode()

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error after the answer has begun, and the end of the stream."""
        return f"data: {json.dumps(error.body())}\n\ndata: [DONE]\n\n".encode()

    def end(self, used: dict[str, Any], reason: str) -> bytes:
        """Return the usage chunk, if requested, and the end of the stream."""
        del reason
        tail = f'{self._head}"choices": [], "usage": {json.dumps(used)}}}\n\n' if self._params.include_usage else ""
        return f"{tail}data: [DONE]\n\n".encode()
