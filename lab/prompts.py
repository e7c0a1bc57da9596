"""Names for the blocks of a trace's prompts and answers, in place of tokens: equal exactly where prefixes are equal. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from lab.content import NamedPrompt
from lab.traces import TraceRequest
from services.common.keys import KEY_TOKENS


class _Block(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A block of the trace: by `key`, the number of the block before it and its own id, its own number and its names. A struct
    that the garbage collector passes over: there are tens of thousands."""

    key: tuple[int, int]
    number: int
    names: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Said:
    """A session's last turn, of `prompt_tokens` and `answer_tokens`: its `ids` in the trace are those of `blocks`, which have the
    first `at` of the prompt's `names`. What the trace does not name, the blocks after those, are `ends`, those of the answer
    included."""

    prompt_tokens: int
    answer_tokens: int
    ids: Sequence[int]
    blocks: list[_Block]
    at: int
    names: Sequence[int]
    ends: Sequence[int]

    def after(self, names: Sequence[int]) -> Sequence[int]:
        """The names that follow these, where these lead into the turn's end."""
        known = len(names) - self.at
        if not 0 <= known < len(self.ends):
            return ()
        last = self.ends[known - 1] if known else self.names[self.at - 1] if self.at else 0
        return self.ends[known:] if last == (names[-1] if names else 0) else ()


_NOTHING = _Said(0, 0, (), [], 0, (), ())


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
        # Oldest first.
        self._known: OrderedDict[tuple[int, int], _Block] = OrderedDict()
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
        before_it = self._said.pop(request.session, _NOTHING)
        said, known = _going_on(request, before_it), self._known
        ids, size, length = request.whole_blocks, request.block_size, request.input_length
        names: list[int] = []
        blocks: list[_Block] = []
        if self._begins_with(ids, before_it):
            names += before_it.names[: before_it.at]
            blocks += before_it.blocks
        before = blocks[-1].number if blocks else 0
        for block in ids[len(blocks) :]:
            if (found := known.get((before, block))) is None:
                break
            if self._tokens is not None:
                known.move_to_end(found.key)
            names += found.names
            blocks.append(found)
            before = found.number
        # What follows a block that is not known is not either: all the rest is named at once.
        there = begin = len(names)
        rest = self._named(said, names, length // KEY_TOKENS - there)
        names += rest
        unknown = ids[len(blocks) :]
        # A number even for a block that ends no key.
        for number, block in zip(self.fresh(len(unknown)), unknown, strict=True):
            key, end = (before, block), (len(blocks) + 1) * size // KEY_TOKENS
            known[key] = found = _Block(key, number, rest[begin - there : end - there])
            blocks.append(found)
            before, begin = number, end
        while self._tokens is not None and len(known) * size > self._tokens:
            known.popitem(last=False)
        answer = self.fresh((length + request.output_length) // KEY_TOKENS - len(names))
        # Kept with its request for as long as that is told of: a tuple of numbers the garbage collector passes over.
        prompt = NamedPrompt(length, tuple(names), answer)
        if not last:
            at = len(ids) * size // KEY_TOKENS
            ends = (*names[at:], *answer) if self._answers_return else ()
            self._said[request.session] = _Said(length, request.output_length, ids, blocks, at, prompt.names, ends)
            if self._tokens is not None and len(self._said) * KEY_TOKENS > self._tokens:
                self._said.popitem(last=False)
        return prompt

    def _begins_with(self, ids: Sequence[int], said: _Said) -> bool:
        """Whether the blocks with these ids begin with those of `said`, and these are known as they were; they have been asked
        for then. Mutates."""
        known, keys = self._known, [block.key for block in said.blocks]
        if ids[: len(keys)] != said.ids or list(map(known.get, keys)) != said.blocks:
            return False
        if self._tokens is not None:
            for key in keys:
                known.move_to_end(key)
        return True

    def _named(self, said: _Said, names: Sequence[int], count: int) -> Sequence[int]:
        """Names of the next `count` blocks after `names`. Mutates."""
        there = said.after(names)[:count]
        return (*there, *self.fresh(count - len(there))) if there else self.fresh(count)


def _going_on(request: TraceRequest, said: _Said) -> _Said:
    """What the session's last turn left, as far as this one can have it."""
    longer_by = request.input_length - said.prompt_tokens
    if longer_by >= said.answer_tokens:
        return said
    if longer_by <= 0:
        return _NOTHING
    return replace(said, answer_tokens=0, ends=said.ends[: said.prompt_tokens // KEY_TOKENS - said.at])
