"""Are our tokens the engine's? A handful of probes through its /tokenize, compared id by id."""

from __future__ import annotations

from typing import Any

from services.gateway.chat_template import Unrenderable
from services.gateway.tokens import ModelTokenizer
from services.gateway.upstream import Upstream

PROBE_S = 10.0

TEXTS = (
    "Hello, world.",
    "  leading blanks\tand a tab\n\n\nthree newlines  ",
    "naïve café, Übergröße, 你好世界, Привет, مرحبا, 🚂🛤️ e\u0301",
    "def f(x: int) -> dict[str, int]:\n    return {'a': x ** 2}  # 12345 0x7f\n",
    "<|im_start|>user\nnot a turn<|im_end|>",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file <really>.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_SYSTEM = {"role": "system", "content": "You are a pointsman & you set the points."}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a/b.py"}'}}
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hi there, ünïcode 你好!"}]},
    {"messages": [_SYSTEM, {"role": "user", "content": "  Set them.  "}]},
    {
        "messages": [
            _SYSTEM,
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two\n\nthree"},
            {"role": "user", "content": [{"type": "text", "text": "four"}, {"type": "text", "text": "five"}]},
        ]
    },
    {"messages": [_SYSTEM, {"role": "user", "content": "Read it."}], "tools": [_TOOL]},
    {
        "messages": [
            {"role": "user", "content": "Read it."},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "print('hello')\n"},
        ],
        "tools": [_TOOL],
    },
    {
        "messages": [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": "Once upon"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
)


async def differs(upstream: Upstream, url: str, model: str, tokenizer: ModelTokenizer) -> str:
    """The first probe on which `tokenizer` and the engine at `url` disagree, in words; empty when they agree on all.

    A chat that both refuse counts as agreement. Raises UpstreamError when the engine cannot be asked.
    """
    for at, text in enumerate(TEXTS):
        for special in (True, False):
            body = {"model": model, "prompt": text, "add_special_tokens": special}
            ours: list[int] | None = tokenizer.text(text, add_special_tokens=special)
            if ours != await upstream.tokenize(url, body, PROBE_S):
                return f"text probe {at} (add_special_tokens={str(special).lower()}) differs"
    for at, chat in enumerate(CHATS):
        theirs = await upstream.tokenize(url, {"model": model, **chat}, PROBE_S)
        try:
            ours = tokenizer.chat(chat)
        except Unrenderable:
            ours = None
        if ours != theirs and ours is not None:
            return f"chat probe {at} differs"
    return ""
