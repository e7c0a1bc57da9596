"""Makes the stream of an engine that has a begun answer in its prompt the rest of that answer's stream."""

from __future__ import annotations

from typing import Any

import msgspec

from pointsman_gateway.core.streaming.sse import EVENT_END, MAX_HELD_BYTES, SseFilter


class RestOfText:
    """Passes the events of the rest to `events`: without the role, which the client has, and with the usage of the whole.
    `prompt_tokens`: number of tokens of the client's prompt; the engine counts those of the begun answer among them."""

    def __init__(self, events: SseFilter, prompt_tokens: int) -> None:
        self._events = events
        self._prompt_tokens = prompt_tokens
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Add a piece of the stream; return the bytes that can be sent now, possibly none. Mutates."""
        *parts, held = EVENT_END.split(self._held + piece)
        # An event that is too long to hold is neither a role nor usage.
        if len(held) > MAX_HELD_BYTES:
            parts, held = [*parts, held, b""], b""
        self._held = held
        events = ((self._event(event), end) for event, end in zip(parts[::2], parts[1::2], strict=True))
        kept = b"".join(event + end for event, end in events if event)
        return self._events.feed(kept) if kept else b""

    def flush(self) -> bytes:
        """Return the held bytes at the end of the stream. Mutates."""
        held, self._held = self._held, b""
        return (self._events.feed(held) if held else b"") + self._events.flush()

    def _event(self, event: bytes) -> bytes:
        """Return an event as the client may see it; empty if it may not."""
        if not event.startswith(b"data: {") or not (b'"role"' in event or b'"usage"' in event):
            return event
        try:
            chunk = msgspec.json.decode(event[6:])
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                if delta.pop("role", None) is not None and not any(delta.values()) and not choice.get("finish_reason"):
                    return b""
            if isinstance(chunk.get("usage"), dict):
                self._correct(chunk["usage"])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, AttributeError, TypeError):
            return event  # of another form than vLLM's
        return b"data: " + msgspec.json.encode(chunk)

    def _correct(self, usage: dict[str, Any]) -> None:
        begun = max(usage.get("prompt_tokens", 0) - self._prompt_tokens, 0)
        usage["prompt_tokens"] = self._prompt_tokens
        usage["completion_tokens"] = usage.get("completion_tokens", 0) + begun
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], self._prompt_tokens)
