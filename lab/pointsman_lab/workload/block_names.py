"""Names that replace the tokens of a trace's prompts and answers: one per block, equal exactly where prefixes are equal. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_lab.engine.prompt_content import NamedPrompt
from pointsman_lab.workload.traces import TraceRequest


class _Block(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A block of the trace. `key` is the number of the block before it and its own id in the trace; `number` is its own number,
    `names` are its names. A struct without garbage collection, because there are tens of thousands of blocks."""

    key: tuple[int, int]
    number: int
    names: Sequence[int]


@dataclass(frozen=True, slots=True)
class _LastTurn:
    """A session's last turn."""

    prompt_tokens: int  # of the turn
    answer_tokens: int  # of the turn
    ids: Sequence[int]  # the trace's ids of `blocks`
    blocks: list[_Block]  # they cover the first `at` names
    at: int  # number of names
    names: Sequence[int]  # of the prompt
    # The names after those, of blocks that the trace does not name; the answer's names are included.
    ends: Sequence[int]

    def after(self, names: Sequence[int]) -> Sequence[int]:
        """Return the names of this turn that follow `names`; empty unless `names` ends at or after `at` within this turn."""
        known = len(names) - self.at
        if not 0 <= known < len(self.ends):
            return ()
        last = self.ends[known - 1] if known else self.names[self.at - 1] if self.at else 0
        return self.ends[known:] if last == (names[-1] if names else 0) else ()


_NO_TURN = _LastTurn(0, 0, (), [], 0, (), ())


class PromptBlocks:
    """Makes the prompts of a trace's requests. A simulation uses one, because names can only be compared with names of the same
    object.

    The names represent the router's keys, one for every 16 tokens. They are numbered in sequence: hashes would identify the same
    blocks, but would collide in every table that they are looked up in. `tokens` limits the tokens of the blocks that are
    remembered; the least recently used blocks are forgotten first. A block that no cache can still hold may as well be new.

    A turn continues the last turn's answer if it has all blocks of the last turn and is longer by at least the answer. Then it
    begins with the names of the last prompt's rest, which no block of the trace names, and with those of the answer. A turn that
    is longer by less lacks the answer or an unknown part of it (reasoning is often left out), and has the last prompt's rest
    alone. Without `prompts_include_answers` no turn has either, as where a replay sends invented text in place of answers.
    """

    def __init__(self, tokens: int | None = None, *, prompts_include_answers: bool = True) -> None:
        self._tokens = tokens
        self._prompts_include_answers = prompts_include_answers
        self._last = 0
        # Oldest first.
        self._known: OrderedDict[tuple[int, int], _Block] = OrderedDict()
        # By session, only between a turn and the next one; oldest first.
        self._last_turns: OrderedDict[str, _LastTurn] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of blocks that are remembered."""
        return len(self._known)

    def new_names(self, count: int = 1) -> range:
        """Return `count` names that are not in use. Mutates."""
        first = self._last + 1
        self._last += count
        return range(first, first + count)

    def prompt_of(self, request: TraceRequest, *, last: bool = True) -> NamedPrompt:
        """Return a request's prompt and the names of its answer. Mutates.

        Blocks that the trace names are shared, and so is what the session's last turn left; all other blocks are new. Unless
        this is the session's `last` turn, the next one may continue from it.
        """
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
        # After an unknown block no block is known, so all the rest is named at once.
        there = begin = len(names)
        rest = self._named(last_turn, names, length // KEY_TOKENS - there)
        names += rest
        unknown = ids[len(blocks) :]
        # A block gets a number even if no key ends in it.
        for number, block in zip(self.new_names(len(unknown)), unknown, strict=True):
            key, end = (before, block), (len(blocks) + 1) * size // KEY_TOKENS
            known[key] = found = _Block(key, number, rest[begin - there : end - there])
            blocks.append(found)
            before, begin = number, end
        while self._tokens is not None and len(known) * size > self._tokens:
            known.popitem(last=False)
        answer = self.new_names((length + request.output_length) // KEY_TOKENS - len(names))
        # A tuple, because the garbage collector does not track a tuple of numbers. The prompt lives as long as its request.
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
        """Return whether `ids` begin with the blocks of `last_turn`, and those blocks are still remembered unchanged. If so, mark
        them as used. Mutates."""
        known, keys = self._known, [block.key for block in last_turn.blocks]
        if ids[: len(keys)] != last_turn.ids or list(map(known.get, keys)) != last_turn.blocks:
            return False
        if self._tokens is not None:
            for key in keys:
                known.move_to_end(key)
        return True

    def _named(self, last_turn: _LastTurn, names: Sequence[int], count: int) -> Sequence[int]:
        """Return the names of the next `count` blocks after `names`. Mutates."""
        there = last_turn.after(names)[:count]
        return (*there, *self.new_names(count - len(there))) if there else self.new_names(count)


def _continued(request: TraceRequest, last_turn: _LastTurn) -> _LastTurn:
    """Return the part of the session's last turn that the request's prompt can begin with."""
    longer_by = request.input_length - last_turn.prompt_tokens
    if longer_by >= last_turn.answer_tokens:
        return last_turn
    if longer_by <= 0:
        return _NO_TURN
    return replace(
        last_turn, answer_tokens=0, ends=last_turn.ends[: last_turn.prompt_tokens // KEY_TOKENS - last_turn.at]
    )
