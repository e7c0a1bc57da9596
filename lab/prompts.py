"""Names for the blocks of a trace's prompts, in place of tokens: equal exactly where prefixes are equal. Pure."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from lab.content import NamedPrompt
from lab.traces import TraceRequest
from services.common.keys import KEY_TOKENS

# Names from here on are those of the trace's blocks, those below are counted.
_SHARED = 1 << 59


class Prompts:
    """Makes prompts; one for a whole simulation, since names only mean something to each other.

    The names stand for the router's keys, one for every 16 tokens. Those of one block of the trace follow each other, from a hash
    of the block and all before it: nothing need be remembered of a trace, however long, and two blocks are given the same names
    once in 10^5 simulations of a million requests. What nobody shares is counted.
    """

    def __init__(self) -> None:
        self._last = 0

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
            before = xxh3_64_intdigest(f"{before} {block}".encode()) % _SHARED + _SHARED
            # A block that ends no key has a hash, and no names.
            names += range(before, before + number * size // KEY_TOKENS - len(names))
        rest = request.input_length // KEY_TOKENS - len(names)
        names += range(self._last + 1, self._last + 1 + rest)
        self._last += rest
        return NamedPrompt(request.input_length, names, self.fresh)
