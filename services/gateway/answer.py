"""What an answer's bytes tell: its usage, whether a stream is complete, whether the engine itself reported a failure. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

TAIL_BYTES = 8 << 10


@dataclass(frozen=True)
class Usage:
    """Tokens as the engine counted them; None where it did not say."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None


class Tail:
    """The last few KiB of a stream, kept as the pieces they came in: no byte is copied until the end."""

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self.events = 0

    def add(self, piece: bytes) -> None:
        """Take note of one piece. Mutates."""
        self.events += piece.count(b"\ndata:") + piece.startswith(b"data:")
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size - len(self._pieces[0]) >= TAIL_BYTES:
            self._size -= len(self._pieces.popleft())

    def summary(self) -> tuple[bool, Usage, str]:
        """Whether the stream ended with [DONE], the usage of its last events, and the engine's own error ("" without)."""
        lines = [line[5:].strip() for line in b"".join(self._pieces).splitlines() if line.startswith(b"data:")]
        complete = bool(lines) and lines[-1] == b"[DONE]"
        usage, error = Usage(), ""
        # Usage is in the last event before [DONE]; one more is looked at for engines that end with an empty choice.
        for line in lines[-3:]:
            event = _object(line)
            if isinstance(event.get("usage"), dict):
                usage = _usage(event["usage"])
            if event.get("error"):
                error = "the engine reported an error"
        return complete, usage, error


def usage_of(body: bytes) -> Usage:
    """Usage of an answer that is one JSON object; all None when it has none."""
    found = _object(body).get("usage")
    return _usage(found) if isinstance(found, dict) else Usage()


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(_count(usage.get("prompt_tokens")), _count(cached), _count(usage.get("completion_tokens")))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32 else None
