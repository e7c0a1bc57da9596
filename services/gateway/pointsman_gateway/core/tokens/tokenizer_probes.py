"""Texts and chats that reveal differences between tokenizers: compared with engines, with split points, and between libraries."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
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

# First and last characters of scripts and of other kinds of characters.
_ENDS = """0-20 20-7E 7F-FF 41-24F 300-36F 370-3FF 400-4FF 531-58A 591-5F4 600-6FF 900-97F 980-9FF B80-BFF C00-C7F E01-E5B F00-FDA
1000-109F 10A0-11FF 1200-137F 1780-17F9 2000-206F 3041-30FF 4E00-9FFF AC00-D7A3 E000-10FFFF F900-FEFF FF00-FFEF 1D400-1D7FF"""
_RANGES = [[int(end, 16) for end in ends.split("-")] for ends in _ENDS.split()]
_WORDS = "'s 'LL n't ... 12 1234567 _ - <0x0A> <| |> {\"a\":1} trackSet HTTPServer 0x7f \u2581 \u0301 \u200d \ufeff \u180e \0"
_PARTS = (
    *_WORDS.split(" "),
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "  \n  ",
        " \u3000",
        "\xa0",
        "\x85",
        "\x1c",
        "\u2028",
        "//\n/",
        "def f(x):\n    ",
    ),
    *("the points ", "\U0001f1e9\U0001f1ea", "\U0001f468\u200d\U0001f469", "\u1100\u1161"),
)


def drawn_texts(added: Sequence[str], count: int, seed: int = 0) -> Iterator[str]:
    """Yield `count` short texts of many scripts, code, characters that combine or belong to none, and whole and broken `added`
    tokens. The same ones for the same `seed`."""
    draw = random.Random(seed)

    def part() -> str:
        kind = draw.random()
        if kind < 0.5:
            first, last = draw.choice(_RANGES)
            return "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 8)))
        if kind < 0.8 or not added:
            return draw.choice(_PARTS)
        token = draw.choice(added)
        return token if kind < 0.95 else token[: draw.randint(0, len(token))]

    for _ in range(count):
        yield "".join(part() for _ in range(draw.randint(1, 24)))


def more_texts(added: Sequence[str]) -> Iterator[str]:
    """Yield texts of every character that is in use, source code, lines of a million characters, and many drawn texts."""
    in_use = (*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE01F0))
    for start in range(0, len(in_use), 1_000):
        yield "".join(f"a{char}b 1{char} {char}.{char}{char}\n" for char in map(chr, in_use[start : start + 1_000]))
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:50]:
        yield file.read_text(encoding="utf-8", errors="replace")[: 1 << 15]
    for part in (" ", "=", "a", "ab ", "\u00e9", "\u4f60\u597d", "-="):
        yield part * ((1 << 20) // len(part))
    yield from drawn_texts(added, 4_000, seed=1)
