"""Names for the blocks of a trace's prompts and answers, in place of tokens: equal exactly where prefixes are equal. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from lab.content import NamedPrompt
from lab.traces import TraceRequest
from services.common.keys import KEY_TOKENS


@dataclass(frozen=True, slots=True)
class _Said:
    """The end of a session's last turn, of `prompt_tokens` and `answer_tokens`: the blocks after the first `at`, which end with
    the name `before` and which the trace names, are `names`, those of the answer included."""

    prompt_tokens: int
    answer_tokens: int
    at: int
    before: int
    names: Sequence[int]

    def after(self, names: Sequence[int]) -> Sequence[int]:
        """The names that follow these, where these lead into the turn's end."""
        known = len(names) - self.at
        if not 0 <= known < len(self.names):
            return ()
        last = self.names[known - 1] if known else self.before
        return self.names[known:] if last == (names[-1] if names else 0) else ()


_NOTHING = _Said(0, 0, 0, 0, ())


class Prompts:
    """Makes prompts; one for a whole simulation, since names only mean something to each other.

    The names stand for the router's keys, one for every 16 tokens, and are counted: hashes would say the same, and collide in
    every table that they are looked up in. With `tokens`, only the blocks last asked for are remembered, so many tokens of them:
    what no cache can hold any more may as well be new.

    A turn that has all blocks of the turn before it, and is longer by its answer at least, goes on from that answer: the rest of
    the last prompt, which no block of the trace names, and the answer are its beginning, with their names. One that is longer
    by less lacks the answer or a part of it, nobody knows which (reasoning is often left out), and has the last prompt's rest
    alone. Without `answers_return` no turn has either, as where a replay makes up what is said in place of answers.
    """

    def __init__(self, tokens: int | None = None, *, answers_return: bool = True) -> None:
        self._tokens = tokens
        self._answers_return = answers_return
        self._last = 0
        # A number of its own and the names of a trace's block, by the number of the block before it and its own id; oldest first.
        self._known: OrderedDict[tuple[int, int], tuple[int, Sequence[int]]] = OrderedDict()
        # By session, between a turn and the next one; oldest first.
        self._said: OrderedDict[str, _Said] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are remembered."""
        return len(self._known)

    def fresh(self, count: int = 1) -> range:
        """Names that nothing has. Mutates."""
        first = self._last + 1
        self._last += count
        return range(first, first + count)

    def of(self, request: TraceRequest, *, last: bool = True) -> NamedPrompt:
        """A request's prompt and the names of its answer: blocks named by the trace are shared, and what the session's last turn
        left; the rest is its own. Unless this is the session's `last` one, the next one may go on from it. Mutates."""
        names: list[int] = []
        said = self._going_on(request)
        before = 0
        size, known = request.block_size, self._known
        for number, block in enumerate(request.whole_blocks, 1):
            key = before, block
            found = known.get(key)
            if found is None:
                count = number * size // KEY_TOKENS - len(names)
                # A number even for a block that ends no key.
                found = known[key] = (self.fresh()[0], self._named(said, names, count))
            elif self._tokens is not None:
                known.move_to_end(key)
            names += found[1]
            before = found[0]
        while self._tokens is not None and len(known) * size > self._tokens:
            known.popitem(last=False)
        length, at = request.input_length, len(names)
        names += self._named(said, names, length // KEY_TOKENS - at)
        answer = self.fresh((length + request.output_length) // KEY_TOKENS - len(names))
        if not last and self._answers_return:
            ends = (*names[at:], *answer)
            before = names[at - 1] if at else 0
            self._said[request.session] = _Said(length, request.output_length, at, before, ends)
            if self._tokens is not None and len(self._said) * KEY_TOKENS > self._tokens:
                self._said.popitem(last=False)
        # Kept with its request for as long as that is told of: a tuple of numbers the garbage collector passes over.
        return NamedPrompt(length, tuple(names), answer)

    def _going_on(self, request: TraceRequest) -> _Said:
        """What the session's last turn left, as far as this one can have it."""
        said = self._said.pop(request.session, _NOTHING)
        longer_by = request.input_length - said.prompt_tokens
        if longer_by >= said.answer_tokens:
            return said
        if longer_by <= 0:
            return _NOTHING
        own = said.prompt_tokens // KEY_TOKENS - said.at
        return _Said(said.prompt_tokens, 0, said.at, said.before, said.names[:own])

    def _named(self, said: _Said, names: Sequence[int], count: int) -> Sequence[int]:
        """Names of the next `count` blocks after `names`. Mutates."""
        there = said.after(names)[:count]
        return (*there, *self.fresh(count - len(there))) if there else self.fresh(count)
