"""Texts and chats that reveal differences between tokenizers: compared with engines, and with the gateway's own split points."""

from __future__ import annotations

from typing import Any

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
    # Long enough to be split at messages and at lines.
    {
        "messages": [
            _SYSTEM | {"content": "A pointsman sets the points <really>. " * 8},
            {"role": "user", "content": "".join(f"{'  ' * (at % 3)}track {at}: señal {at * 7}\n" for at in range(100))},
            {"role": "assistant", "content": "All clear;\tlines 1-3 are free. " * 9},
            {"role": "user", "content": "Next."},
        ]
    },
)
