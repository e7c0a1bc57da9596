"""Simulated engines with a prefix cache that evicts and with KV transfers, and agents that report them. Engines can be ill."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import BlockRemoved, BlockStored, Event
from pointsman_agent.io.report_to_router import Reporter
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
# Maximum context length, in tokens.
CONTEXT = 4_096
# First token of prompts that every engine rejects, and of those that kill the engine that runs them.
BAD, POISON = 60_000, 60_001
# How long after it was started an engine runs a poisonous prompt until it dies, s.
DIES_AFTER_S = 0.1
# Number of tokens of a stream after which an engine stalls.
STALLS_AFTER = 3
# The longest pause between two answers of an engine of which routers know that it answers, s.
ANSWERED_S = 5.0
# Types of the weights, by dialect.
DTYPES = ("bfloat16", "float16")
# Absurd values of gauges.
ABSURD = 1 << 31


@dataclass(slots=True)
class Traits:
    """What an engine has in its pool alone."""

    dialect: int = 0
    """Engines of different dialects answer with different tokens, and cannot read each other's KV. Their identities differ."""
    context: int = CONTEXT
    adapters: tuple[str, ...] = ()
    silent_events: bool = False
    """It has announced KV events, and sends none."""


@dataclass(slots=True)
class Illness:
    """What is wrong with an engine for a time. A hung one is a stopped node."""

    status: int = 0
    """HTTP status with which it answers everything; 0: none."""
    slowness: float = 1.0
    """By what its work takes longer."""
    stalls: bool = False
    """Streams stop after some tokens."""
    spoils: str = ""
    """How each answer ends after some tokens: the connection "breaks"; the answer "ends" too early; an "error" object comes in
    place of its next event, or of its body; or "garbage", which is no JSON."""
    load: str = ""
    """What its gauges are: "missing", or "absurd"."""
    events: str = ""
    """What happens to its KV events: they are "dropped", "contradicting" (removed blocks are not told) or "undecodable", which
    its agent tells."""


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
        traits: Traits | None = None,
    ) -> None:
        self._network = network
        self.traits = traits or Traits()
        self.ill = Illness()
        self.on_request: Callable[[Engine, list[int]], None] = lambda engine, tokens: None
        """Called with the first prompt of each request that arrives."""
        self.on_poison: Callable[[Engine, list[int]], None] = lambda engine, tokens: engine.kill()
        """Called when a prompt is to kill the engine."""
        self.answered_at = -inf
        """When it sent the last token of a stream or whole answer, s on the loop's clock."""
        self.answering_since = inf
        """The first of the last answers between which there was no pause of ANSWERED_S, s."""
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
        self.lied = False
        """Whether the KV events of the current process have lied."""
        self.started_at = 0.0
        """When the current process was started, s on the loop's clock."""
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
        self.lied = self.traits.silent_events or bool(self.ill.events)
        self.started_at, self.answered_at, self.answering_since = asyncio.get_running_loop().time(), -inf, inf

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
            _refuse(reply, 404, "no such model")
            return
        prompts = asked["prompt"] if isinstance(asked["prompt"][0], list) else [asked["prompt"]]
        self.on_request(self, prompts[0])
        if status := self.ill.status or self._refusal(asked, prompts):
            _refuse(reply, status, "no")
            return
        sequences = len(prompts) * asked.get("n", 1)
        self.running += sequences
        life = self.lives
        try:
            if prompts[0][0] == POISON:
                await asyncio.sleep(DIES_AFTER_S)
                self.on_poison(self, prompts[0])
                return
            await self._answer(asked, prompts, transfer, reply)
        finally:
            if life == self.lives:
                self.running -= sequences

    def _refusal(self, asked: dict[str, Any], prompts: list[list[int]]) -> int:
        """Return the status with which the engine refuses a request, rightly; 0: it does not."""
        if asked["model"] not in (self.model, *self.traits.adapters):
            return 404
        return 400 if prompts[0][0] == BAD or max(map(len, prompts)) >= self.traits.context else 0

    async def _answer(
        self, asked: dict[str, Any], prompts: list[list[int]], transfer: dict[str, Any], reply: Any
    ) -> None:
        output, ill = asked["max_tokens"], self.ill
        answers = answers_to(prompts, asked.get("n", 1), output, self.traits.dialect)
        answer = answers[0]
        continued = begun_answer(asked) if self.tells and asked.get("stream") else None
        begun = continued.ids if continued is not None else ()
        assert list(begun) == answer[: len(begun)], "what the client has is another answer"
        tokens = [*prompts[0], *begun]
        lora = "" if asked["model"] == self.model else asked["model"]
        names = [key ^ 1 for key in extend_keys(root_key(self.model, lora), tokens)]
        whole = (len(tokens) - 1) // KEY_TOKENS
        cached = next((at for at, name in enumerate(names[:whole]) if name not in self.cache), whole)
        if transfer.get("do_remote_prefill"):
            if not await self._fetch(transfer, len(tokens)):
                _refuse(reply, 500, "the KV did not come")
                return
            cached = whole
        new = len(tokens) - cached * KEY_TOKENS + sum(map(len, prompts[1:]))
        await asyncio.sleep(new * TOKEN_S * max(self.running, 1) * ill.slowness)
        self._store(tokens, names, lora)
        for prompt in prompts[1:]:
            self._store(prompt, [key ^ 1 for key in extend_keys(root_key(self.model, lora), prompt)], lora)
        if transfer.get("do_remote_decode"):
            self.kept.add(transfer["transfer_id"])
        if asked.get("stream"):
            reply.start(200, "text/event-stream")
            if begun:
                reply.write(b":\n\n")
        for at in range(len(begun), output):
            await asyncio.sleep(OUTPUT_S * ill.slowness)
            if self.ill.spoils and at - len(begun) >= min(STALLS_AFTER, output - len(begun) - 1):
                _spoil(reply, self.ill.spoils, stream=bool(asked.get("stream")))
                return
            if asked.get("stream"):
                while self.ill.stalls and at - len(begun) >= STALLS_AFTER:  # noqa: ASYNC110 - in virtual time
                    await asyncio.sleep(1.0)
                last = at + 1 == output
                for index, one in enumerate(answers):
                    event = _event({"choices": [_choice("length" if last else None, one[at], index)]})
                    reply.write(event if continued is None else with_comment(one[at : at + 1], event, complete=last))
                if not self.ill.spoils:
                    self._answers()
        self._answers()
        self.queries += len(tokens)
        self.hits += cached * KEY_TOKENS
        self.generated += output - len(begun)
        usage = {
            "prompt_tokens": sum(map(len, prompts)),
            "completion_tokens": output * len(answers),
            "prompt_tokens_details": {"cached_tokens": cached * KEY_TOKENS},
        }
        if asked.get("stream"):
            end = b"data: [DONE]\n\n"
            if (asked.get("stream_options") or {}).get("include_usage"):
                end = _event({"choices": [], "usage": usage}) + end
            reply.write(end if continued is None else with_comment((), end, complete=True))
            reply.end()
        else:
            choices = [_choice("length", index=index) for index in range(len(answers))]
            _whole(reply, 200, {"choices": choices, "usage": usage})

    def _answers(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self.answered_at >= ANSWERED_S:
            self.answering_since = now
        self.answered_at = now

    async def _fetch(self, transfer: dict[str, Any], tokens: int) -> bool:
        """Wait for another engine's KV; return whether it came."""
        loop = asyncio.get_running_loop()
        gives_up = loop.time() + FETCH_WITHIN_S
        while (source := self._engine_of(transfer)) is not None and loop.time() < gives_up:
            if transfer["transfer_id"] in source.kept:
                assert source.traits.dialect == self.traits.dialect, "the KV is of another identity"
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

    def _store(self, tokens: list[int], names: list[int], lora: str = "") -> None:
        first = next((at for at, name in enumerate(names) if name not in self.cache), len(names))
        # Blocks after an evicted block are computed anew, and their first copies are removed.
        gone = [name for name in names[first:] if name in self.cache]
        for name in reversed(names):  # a prompt's last blocks are evicted first
            self.cache[name] = None
            self.cache.move_to_end(name)
        gone += [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - self.capacity_blocks)]
        if gone:
            self._publish(BlockRemoved(block_hashes=list(gone), medium="GPU"))
        self.news.set()
        if first < len(names):
            self._publish(
                BlockStored(
                    block_hashes=list(names[first:]),
                    parent_block_hash=names[first - 1] if first else None,
                    token_ids=tokens[first * KEY_TOKENS : len(names) * KEY_TOKENS],
                    block_size=KEY_TOKENS,
                    medium="GPU",
                    lora_name=lora or None,
                )
            )

    def _publish(self, event: Event) -> None:
        if self.traits.silent_events or self.ill.events in ("dropped", "undecodable"):
            return
        if self.ill.events == "contradicting" and isinstance(event, BlockRemoved):
            return  # So the agent has blocks that the engine has not.
        self.log.append(event)


def answers_to(prompts: list[list[int]], n: int, output: int, dialect: int = 0) -> list[list[int]]:
    """Return the token ids of the `n` answers to each prompt, by their index, from an engine of a dialect. The text of a token is
    its id."""
    firsts = [sum(prompt) + len(prompt) + 13 * number + 500 * dialect for prompt in prompts for number in range(n)]
    return [[(first + 7 * at) % 1_000 for at in range(output)] for first in firsts]


def _choice(finish_reason: str | None, token: int = 0, index: int = 0) -> dict[str, Any]:
    return {"index": index, "text": f"{token}", "finish_reason": finish_reason}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode({"id": "x", "object": "text_completion", **chunk}) + b"\n\n"


def _refuse(reply: Any, status: int, message: str) -> None:
    if status == 200:  # a proxy's page
        reply.start(status, "text/html")
        reply.write(b"<html>")
        reply.end()
        return
    _whole(reply, status, {"error": {"message": message, "code": status}})


def _spoil(reply: Any, how: str, *, stream: bool) -> None:
    """End an answer wrongly (Illness.spoils)."""
    what = b'{"error":{"message":"no","code":500}}' if how == "error" else b'{"choices":[{"text":'
    if not stream:
        reply.start(200, "application/json")
        reply.write(b"" if how == "ends" else what)
    elif how in ("error", "garbage"):
        reply.write(b"data: " + what + b"\n\n")
    if how == "breaks":
        reply.lose()
    else:
        if stream and how != "ends":
            reply.write(b"data: [DONE]\n\n")
        reply.end()


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
        self.on_start: Callable[[], None] = lambda: None
        """Called when a process starts."""

    def start(self) -> None:
        """Start a new agent process."""
        self.node = Node(self._name)
        self.on_start()
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
            max_model_len=engine.traits.context,
            lora_names=engine.traits.adapters,
            identity=pb.EngineIdentity(dtype=DTYPES[engine.traits.dialect]),
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
        engine, ill = self._engine, self._engine.ill
        trouble = "a batch cannot be decoded" if ill.events == "undecodable" else ""
        if ill.load == "missing":
            every = ("running", "waiting", "kv_usage", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
            return pb.Load(healthy=engine.node.alive, unknown=every, events_problem=trouble)
        if ill.load == "absurd":
            return pb.Load(
                running=ABSURD,
                waiting=ABSURD,
                kv_usage=1.0,
                generation_tokens=ABSURD,
                prefix_cache_hits=ABSURD,
                preemptions=ABSURD,
                healthy=engine.node.alive,
            )
        return pb.Load(
            running=engine.running,
            healthy=engine.node.alive,
            events_problem=trouble,
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
