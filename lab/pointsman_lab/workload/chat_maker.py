"""Makes chats from a trace's block ids. Equal ids give equal text, so prompts share tokens where the trace says so. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from pointsman_lab.workload.tokenizer import words_of
from pointsman_lab.workload.traces import TraceRequest, by_session, shared_prefix

Message = dict[str, str]


class ChatMaker:
    """Makes the messages of every request of one trace, with `token_scale` times the trace's lengths.

    An id identifies a block and everything before it. Whether a message begins at a block is therefore decided once per id for
    the whole trace, from where turns and shared system prompts begin. Two requests with equal leading ids then have equal
    leading messages, even in different sessions. Each block consists of `words`, which should be one token each.
    """

    def __init__(self, requests: Sequence[TraceRequest], words: Sequence[str], token_scale: float = 1.0) -> None:
        if token_scale <= 0:
            raise ValueError(f"token_scale {token_scale} must be more than 0")
        self._words = words
        self._scale = token_scale
        self._roles: dict[int, str] = {}
        sessions = by_session(requests)
        openings = Counter(block for turns in sessions.values() for block in set(turns[0].hash_ids))
        for turns in sessions.values():
            before: TraceRequest | None = None
            for request in turns:
                kept = shared_prefix(before.hash_ids, request.hash_ids) if before else 0
                if before is not None and kept:
                    self._continue(request.hash_ids[kept:], before.output_length / request.block_size)
                else:
                    self._open(request.hash_ids, openings)
                before = request

    def messages(self, request: TraceRequest) -> list[Message]:
        """Return the chat of a request. It ends with a user message that includes the tokens that no block id covers."""
        chat: list[Message] = []
        for block in request.hash_ids[: request.input_length // request.block_size]:
            text = words_of(f"block {block}", self.tokens(request.block_size), self._words)
            role = self._roles.get(block)
            if role or not chat:
                chat.append({"role": role or "user", "content": text})
            else:
                chat[-1]["content"] += text
        rest = request.input_length % request.block_size
        # The id of a partial block, if it has one, is shared only with requests of the same length.
        if len(request.hash_ids) * request.block_size > request.input_length:
            name = f"block {request.hash_ids[-1]}"
        else:
            name = f"rest of {request.session} turn {request.turn}"
        text = words_of(name, self.tokens(rest) if rest else 0, self._words)
        if chat and chat[-1]["role"] == "user":
            chat[-1]["content"] += text
        else:
            chat.append({"role": "user", "content": text or self._words[0]})
        return chat

    def tokens(self, trace_tokens: int) -> int:
        """Return a length of the trace at this scale, at least 1."""
        return max(1, round(trace_tokens * self._scale))

    def _open(self, ids: Sequence[int], openings: Counter[int]) -> None:
        shared = len(list(takewhile(lambda block: openings[block] > 1, ids)))
        if shared < len(ids):
            self._roles.setdefault(ids[shared], "user")
        if shared and len(ids) > 1:
            self._roles.setdefault(ids[0], "system")

    def _continue(self, new: Sequence[int], answer_blocks: float) -> None:
        if len(new) < 2:
            self._roles.update({block: "user" for block in new if block not in self._roles})
            return
        answer = min(len(new) - 1, max(1, round(answer_blocks)))
        self._roles.setdefault(new[0], "assistant")
        self._roles.setdefault(new[answer], "user")
