"""Names for the blocks of a trace's prompts, in place of tokens: equal exactly where prefixes are equal. Pure."""

from __future__ import annotations

from lab.content import NamedPrompt
from lab.traces import TraceRequest
from services.common.keys import KEY_TOKENS


class Prompts:
    """Makes prompts; one for a whole simulation, since names only mean something to each other.

    The names stand for the router's keys, one for every 16 tokens, and are drawn in order: hashing half a million keys would
    only make the same statement slower.
    """

    def __init__(self) -> None:
        self._last = 0
        # The first name below a trace's block, by the block before it and its own id.
        self._first_of: dict[tuple[int, int], int] = {}

    def fresh(self) -> int:
        """A name that nothing has. Mutates."""
        self._last += 1
        return self._last

    def of(self, request: TraceRequest) -> NamedPrompt:
        """A request's prompt: blocks named by the trace are shared, the rest of the prompt is its own. Mutates."""
        names: list[int] = []
        before = 0
        size = request.block_size
        for number, block in enumerate(request.hash_ids[: request.input_length // size], 1):
            count = number * size // KEY_TOKENS - len(names)
            first = self._first_of.get((before, block))
            if first is None:
                # One more than there are blocks: a block that ends no key must have a name as well.
                first = self._first_of[before, block] = self._last + 1
                self._last += count + 1
            names += range(first, first + count)
            before = first
        rest = request.input_length // KEY_TOKENS - len(names)
        names += range(self._last + 1, self._last + 1 + rest)
        self._last += rest
        return NamedPrompt(request.input_length, names, self.fresh)
