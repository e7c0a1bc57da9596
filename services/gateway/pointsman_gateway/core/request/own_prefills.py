"""What a request has computed before its answer, in slices or at another instance, and what therefore is no cache hit. Pure.

An engine counts as cached whatever it finds, also what earlier steps of the same request have just put there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

# A usage object, with objects of one level in it. Inside a JSON string its quotes would be escaped.
_USAGE = re.compile(rb'"usage":\s?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
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
        """Record that the first `end` tokens are being computed for an instance, which has `predicted` of them by the placement.
        That counts if the answer does not arrive. Mutates."""
        prefix = self._prefixes.setdefault(instance_id, _Prefix(min(predicted, end), 0))
        prefix.end = max(prefix.end, end)

    def ended(self, instance_id: str, end: int, before: int, cached: int) -> None:
        """Record that the first `end` tokens are computed, of which the engine counted `cached` as cached. `before`: how many of
        them earlier steps had put there. Mutates."""
        prefix = self._prefixes.setdefault(instance_id, _Prefix(0, end))
        prefix.end = max(prefix.end, end)
        prefix.found = _found(prefix.found, cached, before) if before else min(cached, end)

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
        """Return an answer, or a piece of a stream, with usage in which only cache hits count as cached."""
        if instance_id not in self._prefixes or b'"usage"' not in answer:
            return answer
        return _USAGE.sub(lambda usage: self._usage(instance_id, usage), answer)

    def _usage(self, instance_id: str, match: re.Match[bytes]) -> bytes:
        try:
            usage = msgspec.json.decode(match[1], type=dict[str, Any])
        except msgspec.MsgspecError:
            return match[0]
        changed = False
        for name in _DETAILS:
            details = usage.get(name)
            if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
                details["cached_tokens"] = cached - self.among(instance_id, cached)
                changed = True
        if isinstance(cached := usage.get("cache_read_input_tokens"), int):
            own = self.among(instance_id, cached)
            usage["cache_read_input_tokens"] = cached - own
            # Anthropic's input_tokens are those that are neither read from nor written to a cache.
            usage["input_tokens"] = usage.get("input_tokens", 0) + own
            changed = True
        return b'"usage":' + msgspec.json.encode(usage) if changed else match[0]


def _found(found: int, cached: int, end: int) -> int:
    """Return how many of `cached` tokens were there without the request, which has computed the rest of the first `end`. `found`:
    those of the first `end`. What is beyond `end` has been computed for others."""
    return min(found, cached) + max(cached - end, 0)
