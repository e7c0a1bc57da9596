"""Names for the blocks of a trace's prompts, in place of tokens: equal exactly where prefixes are equal. Pure."""

from __future__ import annotations

from collections import OrderedDict

from lab.content import NamedPrompt
from lab.traces import TraceRequest
from services.common.keys import KEY_TOKENS


class Prompts:
    """Makes prompts; one for a whole simulation, since names only mean something to each other.

    The names stand for the router's keys, one for every 16 tokens, and are counted: hashes would say the same, and collide in
    every table that they are looked up in. With `tokens`, only the blocks last asked for are remembered, so many tokens of them:
    what no cache can hold any more may as well be new.
    """

    def __init__(self, tokens: int | None = None) -> None:
        self._tokens = tokens
        self._last = 0
        # The first name below a trace's block, by the first one below the block before it and its own id; oldest first.
        self._first_of: OrderedDict[tuple[int, int], int] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are remembered."""
        return len(self._first_of)

    def fresh(self) -> int:
        """A name that nothing has. Mutates."""
        self._last += 1
        return self._last

    def of(self, request: TraceRequest) -> NamedPrompt:
        """A request's prompt: blocks named by the trace are shared, the rest of the prompt is its own. Mutates."""
        names: list[int] = []
        before = 0
        size, first_of = request.block_size, self._first_of
        for number, block in enumerate(request.hash_ids[: request.input_length // size], 1):
            count = number * size // KEY_TOKENS - len(names)
            key = before, block
            first = first_of.get(key)
            if first is None:
                # One more than there are blocks: a block that ends no key must have a name as well.
                first = first_of[key] = self._last + 1
                self._last += count + 1
            elif self._tokens is not None:
                first_of.move_to_end(key)
            names += range(first, first + count)
            before = first
        while self._tokens is not None and len(first_of) * size > self._tokens:
            first_of.popitem(last=False)
        rest = request.input_length // KEY_TOKENS - len(names)
        names += range(self._last + 1, self._last + 1 + rest)
        self._last += rest
        return NamedPrompt(request.input_length, names, self.fresh)
