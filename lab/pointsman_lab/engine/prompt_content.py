"""The content of a request for an engine model: real tokens, or only the names of its blocks. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from pointsman_lab.engine.block_cache import extend_hashes


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt of `length` tokens without token ids. `names` are the hashes of its full blocks, equal where prefixes are equal.
    `answer` has the hashes of the blocks that its answer fills, including the block that prompt and answer share. Named prompts
    make simulations of long prompts cheap."""

    length: int
    names: Sequence[int]
    answer: Sequence[int]

    def __len__(self) -> int:
        return self.length


class TokenContent:
    """Real tokens. Block hashes are computed from them, and an answer is a function of the prompt and a seed. The last `begun`
    tokens of the prompt are the beginning of its answer."""

    __slots__ = ("_block_size", "_hashes", "_ids", "_prompt_length", "_root", "_vocabulary", "digest")

    def __init__(
        self,
        prompt: Sequence[int],
        root: int,
        block_size: int,
        vocabulary: Sequence[int],
        seed: int,
        begun: int = 0,
    ) -> None:
        self._ids = list(prompt)
        self._prompt_length = len(prompt) - begun
        self._root = root
        self._block_size = block_size
        self._vocabulary = vocabulary
        self.digest = xxh3_64_intdigest(array("I", self._ids[: self._prompt_length]).tobytes(), seed)
        self._hashes: list[int] = []
        extend_hashes(self._hashes, root, self._ids, block_size)

    def ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the token ids of prompt and answer from `start` to before `stop`."""
        return tuple(self._ids[start:stop])

    def hashes(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the hashes of the full blocks of prompt and answer from `start` to before `stop`."""
        return tuple(self._hashes[start:stop])

    def append(self, last: int | None = None) -> int:
        """Append a generated token, or `last` if it is given; return its id. Mutates."""
        token = last
        if token is None:
            index = len(self._ids) - self._prompt_length
            # The digest depends on prompt and seed only: equal prompts get equal answers on every instance with that seed.
            draw = xxh3_64_intdigest(index.to_bytes(8, "little"), self.digest)
            token = self._vocabulary[draw % len(self._vocabulary)]
        self._ids.append(token)
        extend_hashes(self._hashes, self._root, self._ids, self._block_size)
        return token


class NamedContent:
    """Block names alone, without token ids; generated tokens are not kept."""

    __slots__ = ("_answer", "_names")

    def __init__(self, prompt: NamedPrompt) -> None:
        self._names = tuple(prompt.names)
        self._answer = prompt.answer

    def ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Return an empty tuple: no ids are known."""
        del start, stop
        return ()

    def hashes(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the names of the full blocks of prompt and answer from `start` to before `stop`."""
        names, beyond = self._names, stop - len(self._names)
        if beyond <= 0:
            return names[start:stop]
        return (*names[start:], *self._answer[max(start - len(names), 0) : beyond])
