"""Simulated engines with a prefix cache that evicts and with KV transfers, and agents that report them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import BlockRemoved, BlockStored, Event
from pointsman_agent.io.report_sender import Reporter
from pointsman_agent.io.state_file import SavedState, restore_cached_blocks, to_saved_state
from pointsman_common.core.block_keys import KEY_TOKENS, extend_keys, root_key
from pointsman_gateway.core.request.transfer_params import RELEASE_MODEL
from pointsman_lab.emulator.answer_records import begun_answer, with_comment
from tests.support.virtual.network import Channel, Network, Node

CAPACITY_BLOCKS = 48
# Duration of prefill per prompt token and running request, and of decode per token, s.
TOKEN_S, OUTPUT_S = 4e-4, 0.02
# Duration of a KV transfer, its duration per token, and the timeout of the decoding engine, s.
TRANSFER_S, TRANSFER_TOKEN_S, FETCH_WITHIN_S = 0.005, 1e-5, 4.0
# Intervals at which an agent sends load, waits for more events, and saves its state, s.
LOAD_S, EVENTS_S, SAVE_S = 0.5, 0.02, 2.0


class Engine:
    """The engine processes that run one after the other at one address."""

    def __init__(
        self,
        instance_id: str,
        model: str,
        network: Network,
        *,
        layerwise: bool,
        tells: bool = True,
        capacity_blocks: int = CAPACITY_BLOCKS,
    ) -> None:
        self._network = network
        self.tells = tells
        """Whether it tells the ids of its answers, and goes on with those of others."""
        self.layerwise = layerwise
        self.capacity_blocks = capacity_blocks
        self.instance_id, self.model, self.url = instance_id, model, f"http://{instance_id}"
        self.node = Node(instance_id)
        self.lives = 0
        self.peers: list[Engine] = []
        """All engines."""
        self.kept: set[str] = set()
        """Ids of transfers whose KV is kept until it is fetched."""
        self.log: list[Event] = []
        self.news = asyncio.Event()
        """Set when the engine has events, or a new incarnation, that its agent has not seen."""
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.running = 0
        self.queries = self.hits = self.generated = 0
        self.unreadable: float | None = None
        """Since when its page of metrics cannot be read, s on the loop's clock; None: it can."""
        self.start()

    def start(self) -> None:
        """Start a new process with an empty cache."""
        self.node = Node(self.instance_id)
        self.lives += 1
        self.log = []
        self.kept = set()
        self.news.set()
        self.cache = OrderedDict()
        self.running = 0

    @property
    def up(self) -> bool:
        """Whether the engine runs."""
        return self.node.alive

    def kill(self) -> None:
        """Kill the process."""
        self._network.kill(self.node)

    @property
    def incarnation(self) -> str:
        """The id of the current process."""
        return f"{self.instance_id}-{self.lives}"

    def fill(self, chains: Iterable[list[int]]) -> None:
        """Put the KV of these prompts into the cache."""
        for tokens in chains:
            self._store(tokens, [key ^ 1 for key in extend_keys(root_key(self.model), tokens)])

    def cached_keys(self) -> set[int]:
        """Return the block keys of the cache. The engine's own block names are different numbers."""
        return {name ^ 1 for name in self.cache}

    async def serve(self, path: str, body: bytes, reply: Any) -> None:
        """Answer one request: a completion, whole or streamed, or Mooncake's /query."""
        if path == "/query":
            _whole(reply, 200, {"0": {"engine_id": self.incarnation}})
            return
        asked = msgspec.json.decode(body)
        transfer = asked.get("kv_transfer_params") or {}
        if asked["model"] == RELEASE_MODEL:
            if (source := self._engine_of(transfer)) is not None:
                source.kept.discard(transfer["transfer_id"])
            _whole(reply, 404, {"error": {"message": "no such model", "code": 404}})
            return
        self.running += 1
        life = self.lives
        try:
            await self._answer(asked, transfer, reply)
        finally:
            if life == self.lives:
                self.running -= 1

    async def _answer(self, asked: dict[str, Any], transfer: dict[str, Any], reply: Any) -> None:
        output, answer = asked["max_tokens"], answer_to(asked["prompt"], asked["max_tokens"])
        continued = begun_answer(asked) if self.tells and asked.get("stream") else None
        begun = continued.ids if continued is not None else ()
        assert list(begun) == answer[: len(begun)], "what the client has is another answer"
        tokens = [*asked["prompt"], *begun]
        names = [key ^ 1 for key in extend_keys(root_key(self.model), tokens)]
        whole = (len(tokens) - 1) // KEY_TOKENS
        cached = next((at for at, name in enumerate(names[:whole]) if name not in self.cache), whole)
        if transfer.get("do_remote_prefill"):
            if not await self._fetch(transfer, len(tokens)):
                _whole(reply, 500, {"error": {"message": "the KV did not come", "code": 500}})
                return
            cached = whole
        await asyncio.sleep((len(tokens) - cached * KEY_TOKENS) * TOKEN_S * max(self.running, 1))
        self._store(tokens, names)
        if transfer.get("do_remote_decode"):
            self.kept.add(transfer["transfer_id"])
        if asked.get("stream"):
            reply.start(200, "text/event-stream")
            if begun:
                reply.write(b":\n\n")
        for at in range(len(begun), output):
            await asyncio.sleep(OUTPUT_S)
            if asked.get("stream"):
                last = at + 1 == output
                event = _event({"choices": [_choice("length" if last else None, answer[at])]})
                reply.write(event if continued is None else with_comment(answer[at : at + 1], event, complete=last))
        self.queries += len(tokens)
        self.hits += cached * KEY_TOKENS
        self.generated += output - len(begun)
        usage = {
            "prompt_tokens": len(asked["prompt"]),
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached * KEY_TOKENS},
        }
        if asked.get("stream"):
            end = b"data: [DONE]\n\n"
            if (asked.get("stream_options") or {}).get("include_usage"):
                end = _event({"choices": [], "usage": usage}) + end
            reply.write(end if continued is None else with_comment((), end, complete=True))
            reply.end()
        else:
            _whole(reply, 200, {"choices": [_choice("length")], "usage": usage})

    async def _fetch(self, transfer: dict[str, Any], tokens: int) -> bool:
        """Wait for another engine's KV; return whether it came."""
        loop = asyncio.get_running_loop()
        gives_up = loop.time() + FETCH_WITHIN_S
        while (source := self._engine_of(transfer)) is not None and loop.time() < gives_up:
            if transfer["transfer_id"] in source.kept:
                await asyncio.sleep(TRANSFER_S + tokens * TRANSFER_TOKEN_S)
                source.kept.discard(transfer["transfer_id"])
                return source.node.alive
            await asyncio.sleep(0.02)
        return False

    def _engine_of(self, transfer: dict[str, Any]) -> Engine | None:
        """Return the engine that keeps the KV of a transfer, or None if it does not run."""
        return next(
            (peer for peer in self.peers if peer.up and peer.incarnation == transfer.get("remote_engine_id")), None
        )

    def _store(self, tokens: list[int], names: list[int]) -> None:
        first = next((at for at, name in enumerate(names) if name not in self.cache), len(names))
        # Blocks after an evicted block are computed anew, and their first copies are removed.
        gone = [name for name in names[first:] if name in self.cache]
        for name in reversed(names):  # a prompt's last blocks are evicted first
            self.cache[name] = None
            self.cache.move_to_end(name)
        gone += [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - self.capacity_blocks)]
        if gone:
            self.log.append(BlockRemoved(block_hashes=list(gone), medium="GPU"))
        self.news.set()
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


def answer_to(prompt: list[int], output: int) -> list[int]:
    """Return the token ids of every engine's answer to a prompt. The text of a token is its id."""
    first = sum(prompt) + len(prompt)
    return [(first + 7 * at) % 1_000 for at in range(output)]


def _choice(finish_reason: str | None, token: int = 0) -> dict[str, Any]:
    return {"index": 0, "text": f"{token}", "finish_reason": finish_reason}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode({"id": "x", "object": "text_completion", **chunk}) + b"\n\n"


def _whole(reply: Any, status: int, body: dict[str, Any]) -> None:
    reply.start(status, "application/json")
    reply.write(msgspec.json.encode(body))
    reply.end()


class Agent:
    """Reports its engines to all routers. Its saved state survives a restart."""

    def __init__(self, name: str, network: Network, engines: list[Engine], routers: list[str]) -> None:
        self._name, self._network, self._engines, self._routers = name, network, engines, routers
        self._disk: dict[str, tuple[SavedState, int]] = {}
        self.node = Node(name)

    def start(self) -> None:
        """Start a new agent process."""
        self.node = Node(self._name)
        for engine in self._engines:
            self.node.spawn(self._watch(engine))

    @property
    def up(self) -> bool:
        """Whether the agent runs."""
        return self.node.alive

    def kill(self) -> None:
        """Kill the process."""
        self._network.kill(self.node)

    async def _watch(self, engine: Engine) -> None:
        known = False
        while True:
            while not engine.node.alive:
                known = True  # the agent sees the next incarnation start
                await asyncio.sleep(LOAD_S)
            await _Watched(engine, self._name, self._disk, saw_start=known).follow(self._network, self._routers)
            known = True


class _Watched:
    """One incarnation of an engine, as its agent sees it."""

    def __init__(self, engine: Engine, agent: str, disk: dict[str, tuple[SavedState, int]], *, saw_start: bool) -> None:
        self._engine, self._agent, self._disk = engine, agent, disk
        self._incarnation = engine.incarnation
        self._applied = 0
        state, applied = disk.get(engine.instance_id, (None, 0))
        if state is not None and state.incarnation == self._incarnation and not saw_start:
            self.cached_blocks, self._applied = (
                restore_cached_blocks(state, capacity_blocks=engine.capacity_blocks),
                applied,
            )
        else:
            latest = 0 if saw_start else int(asyncio.get_running_loop().time()) << 20
            self.cached_blocks = CachedBlocks(engine.model, capacity_blocks=engine.capacity_blocks, latest_seq=latest)

    async def follow(self, network: Network, routers: list[str]) -> None:
        """Report to all routers until the next incarnation begins."""
        engine, loop = self._engine, asyncio.get_running_loop()
        self._apply()
        instance = pb.Instance(
            instance_id=engine.instance_id,
            incarnation=self._incarnation,
            url=engine.url,
            model=engine.model,
            served_names=[engine.model],
            block_size=KEY_TOKENS,
            kv_capacity_tokens=engine.capacity_blocks * KEY_TOKENS,
            max_model_len=4_096,
            prefix_mode=pb.PREFIX_MODE_EXACT,
            kv_transfer=pb.KvTransfer(
                protocol=pb.KV_PROTOCOL_MOONCAKE, bootstrap_url=engine.url, layerwise=engine.layerwise
            ),
        )
        channels: dict[str, Any] = {router: Channel(network, router) for router in routers}
        reporters = [
            Reporter(
                router,
                channels[router],
                tuple,
                self.cached_blocks,
                instance,
                self._agent,
                consistency_check_interval_s=1.0,
                report_interval_s=LOAD_S,
            )
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
                    reporter.load(self._load(), loop.time() if engine.unreadable is None else engine.unreadable)
            if loop.time() >= save_at:
                save_at = loop.time() + SAVE_S
                self._save()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(load_at, save_at)):
                    await engine.news.wait()
                    await asyncio.sleep(EVENTS_S)
            engine.news.clear()
        await asyncio.gather(*(reporter.stop("another one began") for reporter in reporters))

    def _apply(self) -> bool:
        if self._engine.incarnation != self._incarnation:
            return False
        new = self._engine.log[self._applied :]
        self._applied += len(new)
        return bool(new) and self.cached_blocks.apply(new)

    def _load(self) -> pb.Load:
        engine = self._engine
        return pb.Load(
            running=engine.running,
            healthy=engine.node.alive,
            generation_tokens=engine.generated,
            prefix_cache_queries=engine.queries,
            prefix_cache_hits=engine.hits,
            kv_usage=len(engine.cache) / engine.capacity_blocks,
            # One engine is of a version that names these gauges otherwise.
            unknown=("waiting", "kv_usage") if engine.instance_id == "e0:1" else (),
            problem="load unknown: /metrics: TimeoutError" if engine.unreadable is not None else "",
        )

    def _save(self) -> None:
        state = to_saved_state(
            self.cached_blocks,
            clean=False,
            process="p",
            incarnation=self._incarnation,
            applied=self._applied,
            applied_digest=0,
        )
        self._disk[self._engine.instance_id] = (state, self._applied)
