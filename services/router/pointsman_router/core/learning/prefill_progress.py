"""Tracks the prefill progress of placed prompts by their keys, which appear in their instances' events. Pure.

Keys are chained and engines compute from the front, so for each prompt only the next expected key needs to be watched. A report
costs one look-up per watched prompt, and progress one more per block computed. After the first token only the last key of the
predicted prefix is watched: the report of an eviction from before the prefill may come later, and a running request's prefix is
not evicted.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core.prefix.exact_index import PrefixIndex

NO_KEYS: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class OpenPrompt:
    """One open request's prompt on the instance of its step."""

    request_id: str  # as in the step's Reservation
    instance_id: str  # as in the step's Reservation
    opened_at: float  # s
    keys: Sequence[int] = NO_KEYS  # block keys of the prompt
    cached_tokens: int = 0  # how many tokens were predicted to be cached
    device_tokens: int = 0  # those of them that were predicted to be on the GPU
    target_tokens: int = 0  # tokens of the prompt that are on the instance after the step
    reached: int = 0  # number of leading blocks known to be there
    # A part of the predicted prefix was evicted while the request waited, so the engine's report of cached tokens says nothing
    # about the index.
    evicted: bool = False
    learned: int = 0  # number of the prompt, once its keys count as cached (ComputedPrompts.learn); 0 before
    # Tokens that were cached when the step was reserved, by the instance's events; None: not looked up, since these are trusted,
    # or not followed.
    by_events: int | None = None
    by_placements: int | None = None  # the same, by the router's own placements
    # The last key of the predicted prefix on the GPU, while it is watched after the prefill.
    last_key: int | None = None

    @property
    def limit(self) -> int:
        """Number of leading blocks that are on the instance after the step."""
        return min(self.target_tokens // KEY_TOKENS, len(self.keys))

    @property
    def end_of_prefix(self) -> int | None:
        """The last key of the prefix that was predicted to be on the GPU; None without one. Engines evict a prefix from its
        end."""
        last = self.device_tokens // KEY_TOKENS - 1
        return self.keys[last] if last >= 0 else None

    @property
    def prefilled_tokens(self) -> int:
        """Number of tokens after the cached ones that the engine has computed; valid once `reached` has grown."""
        return self.reached * KEY_TOKENS - self.cached_tokens


class PrefillProgress:
    """The prompts whose prefill is watched, by instance."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, OpenPrompt]] = {}
        self._next: dict[str, dict[int, list[OpenPrompt]]] = {}
        # Instance -> last key of the predicted prefix -> prompts that are computed.
        self._computed: dict[str, dict[int, list[OpenPrompt]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def watch(self, prompt: OpenPrompt, index: PrefixIndex) -> None:
        """Start to watch an open prompt. Keys in `index` after the cached ones are no progress, since the engine computes these
        blocks again and sends no events. Mutates."""
        prompt.reached = prompt.cached_tokens // KEY_TOKENS
        _run_on(prompt, index)
        self._waiting.setdefault(prompt.instance_id, {})[prompt.request_id] = prompt
        self._await_next(prompt)

    def unwatch(self, prompt: OpenPrompt) -> bool:
        """Stop watching a prompt; return whether it was watched. Mutates."""
        waiting = self._waiting.get(prompt.instance_id)
        if waiting is None or waiting.pop(prompt.request_id, None) is None:
            return False
        if not waiting:
            del self._waiting[prompt.instance_id]
        if prompt.reached < prompt.limit:
            _remove(self._next, prompt, prompt.keys[prompt.reached])
        return True

    def computed(self, prompt: OpenPrompt) -> None:
        """Watch only the end of a prompt's predicted prefix from now on; no effect if the prompt is not watched. Mutates."""
        if self.unwatch(prompt) and not prompt.evicted and (key := prompt.end_of_prefix) is not None:
            prompt.last_key = key
            self._computed.setdefault(prompt.instance_id, {}).setdefault(key, []).append(prompt)

    def forget(self, prompt: OpenPrompt) -> None:
        """Stop watching a prompt and the end of its prefix. Mutates."""
        self.unwatch(prompt)
        if prompt.last_key is not None:
            _remove(self._computed, prompt, prompt.last_key)
            prompt.last_key = None

    def unwatch_all(self, instance_id: str) -> None:
        """Stop watching all prompts of an instance. Mutates."""
        for prompt in list(self._waiting.get(instance_id, {}).values()):
            self.unwatch(prompt)
        for prompts in self._computed.pop(instance_id, {}).values():
            for prompt in prompts:
                prompt.last_key = None

    def reported(self, instance_id: str, index: PrefixIndex) -> list[OpenPrompt]:
        """Return the prompts that progressed, after the instance's copy in `index` has grown or was replaced. O(expected keys +
        computed blocks), independent of the number of reported keys. Mutates."""
        by_key = self._next.get(instance_id)
        if by_key is None:
            return []
        return self._move(instance_id, by_key, [key for key in by_key if index.holds(instance_id, key)], index)

    def removed(self, instance_id: str, index: PrefixIndex, gone: Collection[int] | None = None) -> None:
        """Mark the watched prompts that lost a part of their predicted prefix, after the keys `gone` of the instance were removed
        (None: all), of which some may have come back.

        Only the last block of each prefix is checked. O(watched prompts of the instance + `gone`). Mutates.
        """
        by_key = self._computed.get(instance_id, {})
        for key in by_key if gone is None else by_key.keys() & gone:
            for prompt in by_key[key]:
                prompt.evicted = True
        for prompt in self._waiting.get(instance_id, {}).values():
            last = prompt.end_of_prefix
            if last is not None and (gone is None or last in gone or not index.holds(instance_id, last)):
                prompt.evicted = True

    def check_invariants(
        self, index: PrefixIndex, live: Container[str], prompts: Mapping[str, OpenPrompt | None]
    ) -> None:
        """Raise AssertionError if the watched prompts and the expected keys contradict each other, the prompts of the open
        requests (`prompts`, by request id) or, for instances whose copy in `index` is `live`, the index."""
        awaited = {
            (instance_id, prompt.request_id): key
            for instance_id, by_key in self._next.items()
            for key, prompts in by_key.items()
            for prompt in prompts
        }
        expected = {
            (instance_id, prompt.request_id): prompt.keys[prompt.reached]
            for instance_id, waiting in self._waiting.items()
            for prompt in waiting.values()
            if prompt.reached < prompt.limit
        }
        assert awaited == expected
        assert all(self._waiting.values())
        assert all(all(by_key.values()) and by_key for by_key in self._next.values())
        for instance_id, waiting in self._waiting.items():
            for request_id, prompt in waiting.items():
                assert prompts[request_id] is prompt
                assert prompt.instance_id == instance_id
                assert (
                    prompt.cached_tokens // KEY_TOKENS
                    <= prompt.reached
                    <= max(prompt.limit, prompt.cached_tokens // KEY_TOKENS)
                )
        assert all(all(by_key.values()) and by_key for by_key in self._computed.values())
        for instance_id, by_key in self._computed.items():
            for key, computed in by_key.items():
                for prompt in computed:
                    assert prompts[prompt.request_id] is prompt
                    assert (prompt.instance_id, prompt.last_key) == (instance_id, key)
        for (instance_id, request_id), key in awaited.items():
            assert instance_id not in live or not index.holds(instance_id, key), (instance_id, request_id)

    def _move(
        self, instance_id: str, by_key: dict[int, list[OpenPrompt]], keys: Iterable[int], index: PrefixIndex
    ) -> list[OpenPrompt]:
        found = [prompt for key in keys for prompt in by_key.pop(key)]
        if found and not by_key:
            del self._next[instance_id]
        moved = []
        for prompt in found:
            if _run_on(prompt, index):
                moved.append(prompt)
            self._await_next(prompt)
        return moved

    def _await_next(self, prompt: OpenPrompt) -> None:
        if prompt.reached < prompt.limit:
            by_key = self._next.setdefault(prompt.instance_id, {})
            by_key.setdefault(prompt.keys[prompt.reached], []).append(prompt)


def _remove(watched: dict[str, dict[int, list[OpenPrompt]]], prompt: OpenPrompt, key: int) -> None:
    """Remove a prompt from those of its instance that wait for `key`, and what is empty then. Mutates."""
    by_key = watched[prompt.instance_id]
    by_key[key].remove(prompt)
    if not by_key[key]:
        del by_key[key]
    if not by_key:
        del watched[prompt.instance_id]


def _run_on(prompt: OpenPrompt, index: PrefixIndex) -> bool:
    before = prompt.reached
    prompt.reached = index.run_end(prompt.instance_id, prompt.keys, before, max(before, prompt.limit))
    return prompt.reached > before
