"""Whatever engines and hub do, a tokenizer is exact only for engines that have its tokens, and is so again when all is well."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.pool_state import PoolState, TokenizerStatus
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.io.routing.pool_check import REFUSED_AGAIN_S, PoolCheck
from pointsman_gateway.io.tokenizer_files import HubUnreachable, TokenizerNotFound
from tests.support.virtual.loop import VirtualLoop, virtual_clocks
from tests.support.waiting import eventually

SOURCES = ("maker/m", "maker/m@a", "maker/m@b", "maker/other")
NAMES, TOKENS, ROOTS = st.sampled_from(["e1", "e2", "e3"]), st.integers(1, 3), st.sampled_from(SOURCES)
EVENTS = st.one_of(
    st.tuples(st.just("starts"), NAMES, TOKENS, st.sampled_from(["", *SOURCES])),
    st.tuples(st.just("leaves"), NAMES),
    st.tuples(st.just("is_silent"), NAMES, st.booleans()),
    st.tuples(st.just("tells_root"), ROOTS),
    st.tuples(st.just("has"), ROOTS, st.sampled_from(["ok", "away", "refused"]), TOKENS),
    st.tuples(st.just("miscounts")),
    st.tuples(st.just("waits"), st.sampled_from([0.01, 0.3, 2.0, 9.0, 20.0, 100.0, 400.0])),
)
LOADS_IN_AN_HOUR = 3600 / 60 + 3600 / REFUSED_AGAIN_S * 2 + 10


class World:
    """Engines, a hub, and what PoolCheck uses of the pools. A number stands for a tokenizer."""

    def __init__(self) -> None:
        self.state = PoolState(placement_pb2.Pool(model="m", model_root=SOURCES[0]))
        self.check = PoolCheck(self, self.state)
        self.engines: dict[str, int] = {}
        self.silent: set[str] = set()
        self.hub = dict.fromkeys(SOURCES, ("ok", 1))
        self.kept: dict[str, int] = {}
        self.loads = 0
        # By source, tokenizer, URL and incarnation: whether the engine has its tokens. With another source all is compared anew,
        # and an engine that is silent then counts as one that was never compared.
        self.answers: dict[tuple[str, int, str, str], bool] = {}
        self._incarnations = 0

    # What the check asks.

    def source(self, state: PoolState) -> str:
        return state.pool.model_root

    def is_pinned(self, source: str) -> bool:
        return False

    async def load(self, source: str, *, newest: bool = False) -> ModelTokenizer:
        if newest or source not in self.kept:
            self.loads += 1
            await asyncio.sleep(3.0)
            there, tokens = self.hub[source]
            if there == "away":
                raise HubUnreachable("away")
            if there == "refused":
                raise TokenizerNotFound("refused")
            self.kept[source] = tokens
        return cast(ModelTokenizer, self.kept[source])

    async def compare(self, state: PoolState, url: str) -> str | None:
        lives = {instance.url: instance.incarnation for instance in state.pool.instances}
        ours = cast(int, state.tokenizer)
        await asyncio.sleep(0.5)
        if url not in self.engines or url in self.silent:
            return None
        equal = self.engines[url] == ours
        self.answers[state.source, ours, url, lives[url]] = equal
        return "" if equal else "differs"

    def set_status(self, state: PoolState, tokenizer_status: TokenizerStatus, reason: str = "") -> None:
        state.tokenizer_status, state.reason = tokenizer_status, reason

    # What happens.

    def starts(self, url: str, tokens: int, root: str = "") -> None:
        self._incarnations += 1
        self.leaves(url)
        self.engines[url] = tokens
        incarnation = str(self._incarnations)
        self.state.pool.instances.add(instance_id=url, url=url, incarnation=incarnation, model_root=root)

    def leaves(self, url: str) -> None:
        self.engines.pop(url, None)
        left = [instance for instance in self.state.pool.instances if instance.url != url]
        del self.state.pool.instances[:]
        self.state.pool.instances.extend(left)

    def is_silent(self, url: str, silent: bool) -> None:
        (self.silent.add if silent else self.silent.discard)(url)

    def tells_root(self, root: str) -> None:
        self.state.pool.model_root = root

    def has(self, source: str, there: str, tokens: int) -> None:
        self.hub[source] = (there, tokens)

    def miscounts(self) -> None:
        self.check.notice(again=True)

    def is_safe(self) -> bool:
        """Return whether the status is not EXACT, or no present engine had other tokens than the tokenizer when last compared.
        Those that have theirs from another place do not count."""
        ours = cast(int, self.state.tokenizer)
        compared = self.state.incarnations() - self.state.foreign()
        answers = [self.answers.get((self.state.source, ours, *incarnation)) for incarnation in compared]
        return self.state.tokenizer_status is not TokenizerStatus.EXACT or False not in answers


async def play(events: list[tuple[Any, ...]]) -> None:
    world = World()
    try:
        for name, *given_ in events:
            if name == "waits":
                await asyncio.sleep(given_[0])
            else:
                getattr(world, name)(*given_)
                world.check.notice()
            assert world.is_safe()
        before = world.loads
        await asyncio.sleep(3600)
        assert world.is_safe()
        assert world.loads - before <= LOADS_IN_AN_HOUR
        # All is well: the engines have what their source has.
        world.silent.clear()
        tokens = max(world.engines.values(), default=1)
        for url in list(world.engines):
            world.starts(url, tokens)
        world.has(world.state.pool.model_root, "ok", tokens)
        world.check.notice()
        await asyncio.sleep(2 * REFUSED_AGAIN_S)
        if world.engines:
            assert world.state.tokenizer_status is TokenizerStatus.EXACT, world.state.reason
        assert world.is_safe()
    finally:
        await world.check.close()


async def _another_tokenizer() -> None:
    world = World()
    world.starts("a", 2, SOURCES[3])
    world.starts("b", 1, SOURCES[0])
    world.check.notice()
    try:
        await eventually(
            lambda: (world.state.tokenizer_status, world.state.source) == (TokenizerStatus.EXACT, SOURCES[0])
        )
    finally:
        await world.check.close()
    state = world.state
    assert (state.tokens_equal("a", "1"), state.tokens_equal("b", "2"), state.tokens_equal("c", "3")) == (
        False,
        True,
        None,
    )


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in virtual time."""
    loop = VirtualLoop()
    with virtual_clocks(loop):
        try:
            loop.run_until_complete(work)
        finally:
            loop.end()


def test_one_engine_with_another_tokenizer_costs_the_others_nothing() -> None:
    run(_another_tokenizer())


@given(st.lists(EVENTS, max_size=12))
@example(
    [
        ("starts", "e1", 2, ""),
        ("waits", 9.0),
        ("starts", "e2", 1, ""),
        ("is_silent", "e1", True),
        ("tells_root", SOURCES[1]),
    ]
)
def test_exact_is_what_engines_say_and_comes_back(events: list[tuple[Any, ...]]) -> None:
    run(play(events))
