"""Names for the blocks of a trace's prompts and answers, in place of tokens: equal exactly where prefixes are equal. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from pointsman.common.core.block_keys import KEY_TOKENS
from pointsman.lab.engine.prompt_content import NamedPrompt
from pointsman.lab.workload.traces import TraceRequest


class _Block(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A block of the trace: by `key`, the number of the block before it and its own id, its own number and its names. A struct
    that the garbage collector passes over: there are tens of thousands."""

    key: tuple[int, int]
    number: int
    names: Sequence[int]


@dataclass(frozen=True, slots=True)
class _LastTurn:
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


_NO_TURN = _LastTurn(0, 0, (), [], 0, (), ())


class PromptBlocks:
    """Makes prompts; one for a whole simulation, since names only mean something to each other.

    The names stand for the router's keys, one for every 16 tokens, and are counted: hashes would say the same, and collide in
    every table that they are looked up in. With `tokens`, only the blocks last asked for are remembered, so many tokens of them:
    what no cache can hold any more may as well be new.

    A turn that has all blocks of the turn before it, and is longer by its answer at least, goes on from that answer: the rest of
    the last prompt, which no block of the trace names, and the answer are its beginning, with their names. One that is longer
    by less lacks the answer or a part of it, nobody knows which (reasoning is often left out), and has the last prompt's rest
    alone. Without `prompts_include_answers` no turn has either, as where a replay makes up what is said in place of answers.
    """

    def __init__(self, tokens: int | None = None, *, prompts_include_answers: bool = True) -> None:
        self._tokens = tokens
        self._prompts_include_answers = prompts_include_answers
        self._last = 0
        # Oldest first.
        self._known: OrderedDict[tuple[int, int], _Block] = OrderedDict()
        # By session, between a turn and the next one; oldest first.
        self._last_turns: OrderedDict[str, _LastTurn] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks are remembered."""
        return len(self._known)

    def new_names(self, count: int = 1) -> range:
        """Names that nothing has. Mutates."""
        first = self._last + 1
        self._last += count
        return range(first, first + count)

    def prompt_of(self, request: TraceRequest, *, last: bool = True) -> NamedPrompt:
        """A request's prompt and the names of its answer: blocks named by the trace are shared, and what the session's last turn
        left; the rest is its own. Unless this is the session's `last` one, the next one may go on from it. Mutates."""
        before_it = self._last_turns.pop(request.session, _NO_TURN)
        last_turn, known = _continued(request, before_it), self._known
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
        rest = self._named(last_turn, names, length // KEY_TOKENS - there)
        names += rest
        unknown = ids[len(blocks) :]
        # A number even for a block that ends no key.
        for number, block in zip(self.new_names(len(unknown)), unknown, strict=True):
            key, end = (before, block), (len(blocks) + 1) * size // KEY_TOKENS
            known[key] = found = _Block(key, number, rest[begin - there : end - there])
            blocks.append(found)
            before, begin = number, end
        while self._tokens is not None and len(known) * size > self._tokens:
            known.popitem(last=False)
        answer = self.new_names((length + request.output_length) // KEY_TOKENS - len(names))
        # Kept with its request for as long as that is told of: a tuple of numbers the garbage collector passes over.
        prompt = NamedPrompt(length, tuple(names), answer)
        if not last:
            at = len(ids) * size // KEY_TOKENS
            ends = (*names[at:], *answer) if self._prompts_include_answers else ()
            self._last_turns[request.session] = _LastTurn(
                length, request.output_length, ids, blocks, at, prompt.names, ends
            )
            if self._tokens is not None and len(self._last_turns) * KEY_TOKENS > self._tokens:
                self._last_turns.popitem(last=False)
        return prompt

    def _begins_with(self, ids: Sequence[int], last_turn: _LastTurn) -> bool:
        """Whether the blocks with these ids begin with those of `last_turn`, and these are known as they were; they have been
        asked for then. Mutates."""
        known, keys = self._known, [block.key for block in last_turn.blocks]
        if ids[: len(keys)] != last_turn.ids or list(map(known.get, keys)) != last_turn.blocks:
            return False
        if self._tokens is not None:
            for key in keys:
                known.move_to_end(key)
        return True

    def _named(self, last_turn: _LastTurn, names: Sequence[int], count: int) -> Sequence[int]:
        """Names of the next `count` blocks after `names`. Mutates."""
        there = last_turn.after(names)[:count]
        return (*there, *self.new_names(count - len(there))) if there else self.new_names(count)


def _continued(request: TraceRequest, last_turn: _LastTurn) -> _LastTurn:
    """What the session's last turn left, as far as this one can have it."""
    longer_by = request.input_length - last_turn.prompt_tokens
    if longer_by >= last_turn.answer_tokens:
        return last_turn
    if longer_by <= 0:
        return _NO_TURN
    return replace(
        last_turn, answer_tokens=0, ends=last_turn.ends[: last_turn.prompt_tokens // KEY_TOKENS - last_turn.at]
    )
