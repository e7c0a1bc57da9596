"""Engines with a prefix cache that evicts, and the way to them over HTTP; agents that report them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from pointsman.agent.v1 import agent_pb2 as pb
from services.agent.kv_events import BlockRemoved, BlockStored, Event
from services.agent.persist import State, capture, revive
from services.agent.reporter import Reporter
from services.agent.shadow import Shadow
from services.common.keys import KEY_TOKENS, extend_keys, root_key
from services.gateway.http.message import Headers
from services.gateway.moves import Target
from services.gateway.upstream import UpstreamError
from tests.chaos.virtual.network import Channel, Network, Node, here

CAPACITY_BLOCKS = 48
TOKEN_S, OUTPUT_S = 4e-4, 0.02
LOAD_S, EVENTS_S, SAVE_S = 0.5, 0.02, 2.0


class Engine:
    """One engine process after another under one address."""

    def __init__(self, instance_id: str, model: str, network: Network) -> None:
        self._network = network
        self.instance_id, self.model, self.url = instance_id, model, f"http://{instance_id}"
        self.node = Node(instance_id)
        self.lives = 0
        self.log: list[Event] = []
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.running = 0
        self.queries = self.hits = self.generated = 0
        self.start()

    def start(self) -> None:
        """A new process with an empty cache."""
        self.node = Node(self.instance_id)
        self.lives += 1
        self.log = []
        self.cache = OrderedDict()
        self.running = 0

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.node.alive

    def kill(self) -> None:
        """Go at once."""
        self._network.kill(self.node)

    @property
    def incarnation(self) -> str:
        """The name of this lifetime."""
        return f"{self.instance_id}-{self.lives}"

    def cached_keys(self) -> set[int]:
        """What is cached: an engine names its blocks otherwise."""
        return {name ^ 1 for name in self.cache}

    async def complete(self, tokens: list[int], output: int) -> dict[str, int]:
        """Compute a prompt and an answer; its usage."""
        names = [key ^ 1 for key in extend_keys(root_key(self.model), tokens)]
        cached = 0
        for name in names[: (len(tokens) - 1) // KEY_TOKENS]:
            if name not in self.cache:
                break
            cached += 1
        self.running += 1
        life = self.lives
        try:
            await asyncio.sleep((len(tokens) - cached * KEY_TOKENS) * TOKEN_S * max(self.running, 1))
            self._store(tokens, names)
            await asyncio.sleep(output * OUTPUT_S)
        finally:
            if life == self.lives:
                self.running -= 1
        self.queries += len(tokens)
        self.hits += cached * KEY_TOKENS
        self.generated += output
        return {"prompt_tokens": len(tokens), "completion_tokens": output, "cached_tokens": cached * KEY_TOKENS}

    def _store(self, tokens: list[int], names: list[int]) -> None:
        first = next((at for at, name in enumerate(names) if name not in self.cache), len(names))
        # Blocks behind one that was evicted are computed anew, and their first copies let go.
        gone = [name for name in names[first:] if name in self.cache]
        for name in reversed(names):  # a prompt's last blocks are the first to be evicted
            self.cache[name] = None
            self.cache.move_to_end(name)
        gone += [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - CAPACITY_BLOCKS)]
        if gone:
            self.log.append(BlockRemoved(block_hashes=list(gone), medium="GPU"))
        if first < len(names):
            self.log.append(
                BlockStored(
                    block_hashes=list(names[first:]),
                    parent_block_hash=names[first - 1] if first else None,
                    token_ids=tokens[first * KEY_TOKENS : len(names) * KEY_TOKENS],
                    block_size=KEY_TOKENS,
                    medium="GPU",
                )
            )


class Answer:
    """An answer's head and body."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body
        self.media_type = "application/json"
        self.headers = Headers()

    def close(self) -> None:
        """Nothing to close: whoever gives up cancels."""


class Upstream:
    """A gateway's way to the engines."""

    def __init__(self, network: Network, engines: Mapping[str, Engine]) -> None:
        self._network = network
        self._engines = {engine.url: engine for engine in engines.values()}
        self._gateway = here()

    async def post(self, target: Target, path: str, payload: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a completion. Raises UpstreamError."""
        engine = self._engines.get(target.url)
        if engine is None:
            raise UpstreamError("nobody knows where the instance is", sent=False)
        await self._way(engine)
        if not engine.node.alive:
            raise UpstreamError("connection refused", sent=False)
        asked = msgspec.json.decode(payload)
        run = engine.node.spawn(engine.complete(asked["prompt"], asked["max_tokens"]))
        try:
            usage = await asyncio.shield(run)
        except asyncio.CancelledError:
            if run.cancelled():
                raise UpstreamError("connection lost") from None
            run.cancel()
            raise
        await self._way(engine)
        told: dict[str, Any] = {
            "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
            "usage": usage | {"prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]}},
        }
        return Answer(200, msgspec.json.encode(told))

    async def read_all(self, answer: Answer) -> bytes:
        """The body."""
        return answer.body

    async def whole(self, target: Target, path: str, payload: bytes, headers: Mapping[str, str]) -> bytes:
        """The body of a 200 answer. Raises UpstreamError."""
        return (await self.post(target, path, payload, headers)).body

    async def _way(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(self._network.delay_s())
            if not self._network.is_cut(self._gateway.name, engine.instance_id):
                return
            await asyncio.sleep(0.05)


class Agent:
    """Reports its engines to all routers; what it saves outlives it."""

    def __init__(self, name: str, network: Network, engines: list[Engine], routers: list[str]) -> None:
        self._name, self._network, self._engines, self._routers = name, network, engines, routers
        self._disk: dict[str, tuple[State, int]] = {}
        self.node = Node(name)

    def start(self) -> None:
        """A new agent process."""
        self.node = Node(self._name)
        for engine in self._engines:
            self.node.spawn(self._watch(engine))

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.node.alive

    def kill(self) -> None:
        """Go at once."""
        self._network.kill(self.node)

    async def _watch(self, engine: Engine) -> None:
        known = False
        while True:
            while not engine.node.alive:
                known = True  # it will be seen to begin
                await asyncio.sleep(LOAD_S)
            await _Watched(engine, self._name, self._disk, witnessed=known).follow(self._network, self._routers)
            known = True


class _Watched:
    """One incarnation of an engine, as its agent sees it."""

    def __init__(self, engine: Engine, agent: str, disk: dict[str, tuple[State, int]], *, witnessed: bool) -> None:
        self._engine, self._agent, self._disk = engine, agent, disk
        self._incarnation = engine.incarnation
        self._applied = 0
        state, applied = disk.get(engine.instance_id, (None, 0))
        if state is not None and state.incarnation == self._incarnation and not witnessed:
            self.shadow, self._applied = revive(state, capacity_blocks=CAPACITY_BLOCKS), applied
        else:
            latest = 0 if witnessed else int(asyncio.get_running_loop().time()) << 20
            self.shadow = Shadow(engine.model, capacity_blocks=CAPACITY_BLOCKS, latest_seq=latest)

    async def follow(self, network: Network, routers: list[str]) -> None:
        """Report until another incarnation begins."""
        engine, loop = self._engine, asyncio.get_running_loop()
        self._apply()
        instance = pb.Instance(
            instance_id=engine.instance_id,
            incarnation=self._incarnation,
            url=engine.url,
            model=engine.model,
            served_names=[engine.model],
            block_size=KEY_TOKENS,
            kv_capacity_tokens=CAPACITY_BLOCKS * KEY_TOKENS,
            max_model_len=4_096,
            prefix_mode=pb.PREFIX_MODE_EXACT,
        )
        reporters = [
            Reporter(router, Channel(network, router), (), self.shadow, instance, self._agent, 1.0)  # type: ignore[arg-type]
            for router in routers
        ]
        load_at = save_at = loop.time()
        while engine.incarnation == self._incarnation:
            if self._apply():
                for reporter in reporters:
                    reporter.changed()
            if loop.time() >= load_at:
                load_at = loop.time() + LOAD_S
                for reporter in reporters:
                    reporter.load(self._load(), loop.time())
            if loop.time() >= save_at:
                save_at = loop.time() + SAVE_S
                self._save()
            await asyncio.sleep(EVENTS_S)
        await asyncio.gather(*(reporter.stop("another one began") for reporter in reporters))

    def _apply(self) -> bool:
        if self._engine.incarnation != self._incarnation:
            return False
        new = self._engine.log[self._applied :]
        self._applied += len(new)
        return bool(new) and self.shadow.apply(new)

    def _load(self) -> pb.Load:
        engine = self._engine
        return pb.Load(
            running=engine.running,
            healthy=engine.node.alive,
            generation_tokens=engine.generated,
            prefix_cache_queries=engine.queries,
            prefix_cache_hits=engine.hits,
            kv_usage=len(engine.cache) / CAPACITY_BLOCKS,
        )

    def _save(self) -> None:
        state = capture(
            self.shadow,
            clean=False,
            process="p",
            incarnation=self._incarnation,
            applied=self._applied,
            applied_digest=0,
        )
        self._disk[self._engine.instance_id] = (state, self._applied)
