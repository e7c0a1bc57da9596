"""What a request has computed before its answer, in slices or at another instance, and what therefore is no cache hit. Pure.

An engine counts as cached whatever it finds, also what earlier steps of the same request have just put there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

# The data of an event that may have usage.
_DATA = re.compile(rb'(?<=^data: )\{[^\r\n]*"usage"[^\r\n]*', re.MULTILINE)
# Members of an event that may have usage: Anthropic's message_start, and the last event of a response.
_WITHIN = ("message", "response")
_DETAILS = ("prompt_tokens_details", "input_tokens_details")


@dataclass
class _Prefix:
    """The part of a prompt that is on an instance before a step of the request.

    `found`: tokens of it that were cached without the request. `end`: its size, in tokens.
    """

    found: int
    end: int


class OwnPrefills:
    """The prefixes that one request has put on instances."""

    def __init__(self) -> None:
        self._prefixes: dict[str, _Prefix] = {}

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def begun(self, instance_id: str, end: int, predicted: int) -> None:
        """Record that the first `end` tokens may be computed at an instance whose answer did not arrive. By the placement it had
        `predicted` of them. Mutates."""
        prefix = self._prefixes.setdefault(instance_id, _Prefix(min(predicted, end), 0))
        prefix.end = max(prefix.end, end)

    def ended(self, instance_id: str, end: int, before: int, cached: int) -> None:
        """Record that the first `end` tokens are computed, of which the engine counted `cached` as cached. `before`: how many of
        them earlier steps had put there. Mutates."""
        prefix = self._prefixes.setdefault(instance_id, _Prefix(0, end))
        prefix.end = max(prefix.end, end)
        prefix.found = min(_found(prefix.found, cached, before) if before else cached, end)

    def end(self, instance_id: str) -> int:
        """Return how many tokens the request has put on an instance, or is putting there; 0 if none."""
        prefix = self._prefixes.get(instance_id)
        return prefix.end if prefix is not None else 0

    def among(self, instance_id: str, cached: int | None) -> int:
        """Return how many of the tokens that an instance's engine counts as cached the request has computed itself."""
        prefix = self._prefixes.get(instance_id)
        if prefix is None or not cached:
            return 0
        return cached - _found(prefix.found, cached, prefix.end)

    def corrected(self, instance_id: str, answer: bytes) -> bytes:
        """Return an answer, or the data of an event, in whose usage only cache hits count as cached. All other values keep their
        bytes, whatever they contain; so does an answer that is no JSON object."""
        if instance_id not in self._prefixes or b'"usage"' not in answer:
            return answer
        try:
            return self._corrected(instance_id, answer) or answer
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return answer

    def corrected_events(self, instance_id: str, events: bytes) -> bytes:
        """Return a piece of a stream, with the data of each whole event as `corrected`."""
        return _DATA.sub(lambda data: self.corrected(instance_id, data[0]), events)

    def _corrected(self, instance_id: str, text: bytes | msgspec.Raw) -> bytes | None:
        members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        changed = {
            name: self._corrected(instance_id, members[name]) for name in _WITHIN if _is_object(members.get(name))
        }
        if _is_object(members.get("usage")):
            changed["usage"] = self._usage(instance_id, members["usage"])
        members |= {name: msgspec.Raw(value) for name, value in changed.items() if value is not None}
        return msgspec.json.encode(members) if any(changed.values()) else None

    def _usage(self, instance_id: str, text: msgspec.Raw) -> bytes | None:
        usage = msgspec.json.decode(text, type=dict[str, Any])
        changed = False
        for name in _DETAILS:
            details = usage.get(name)
            if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
                details["cached_tokens"] = cached - self.among(instance_id, cached)
                changed = True
        cached, new = usage.get("cache_read_input_tokens"), usage.get("input_tokens")
        if isinstance(cached, int) and isinstance(new, int):
            own = self.among(instance_id, cached)
            # Anthropic's input_tokens are those that are neither read from nor written to a cache.
            usage |= {"cache_read_input_tokens": cached - own, "input_tokens": new + own}
            changed = True
        return msgspec.json.encode(usage) if changed else None


def _is_object(value: msgspec.Raw | None) -> bool:
    return value is not None and bytes(value).lstrip().startswith(b"{")


def _found(found: int, cached: int, end: int) -> int:
    """Return how many of `cached` tokens were there without the request, which has computed the rest of the first `end`. `found`:
    those of the first `end`. What is beyond `end` has been computed for others."""
    return min(found, cached) + max(cached - end, 0)
