"""A fleet of two pools, two routers, two gateways and at least two agents, and clients that check their answers."""

from __future__ import annotations

import asyncio
import random
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import msgspec
import redis.asyncio

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_gateway.core.api import ApiRequestError, Endpoint, parse
from pointsman_gateway.core.api.decode_body import decode_light
from pointsman_gateway.core.http_message import Headers, Request
from pointsman_gateway.core.memory_budget import Holding, MemoryBudget
from pointsman_gateway.core.pool_state import PoolState
from pointsman_gateway.core.rate_limits import KeyCharge
from pointsman_gateway.core.request.prepare import set_keys
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.request_events import RequestTimeouts
from pointsman_gateway.core.request.transfer_params import supports_inline_kv_transfer, transfer_obstacle
from pointsman_gateway.core.session_ends import SessionEnds
from pointsman_gateway.core.tenants import ANYONE
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.engines.remote_prefill import EngineIdCache, KvReleases
from pointsman_gateway.io.request.request_runner import RequestRunner
from pointsman_gateway.io.request.shared_context import SharedContext
from pointsman_gateway.io.routing.router_client import RouterClient
from pointsman_gateway.io.telemetry.line_log import LineLog
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics
from tests.support.virtual import invariants
from tests.support.virtual import store as virtual_store
from tests.support.virtual.charging import PREBUILT, PREBUILT_SESSIONS, Charges
from tests.support.virtual.costs import AS_BUILT, Declared
from tests.support.virtual.engines import BAD, CAPACITY_BLOCKS, CONTEXT, POISON, Agent, Engine, Traits, answers_to
from tests.support.virtual.http import ResponseWriter, upstream
from tests.support.virtual.invariants import Disturbances, InvariantViolation, LeaseWatch, LifeWatch
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.network import NETWORK_CONTEXT, Channel, Network, Node
from tests.support.virtual.routers import LEASE_S, CheckedRouter, RouterNode

MODELS = ("m", "n")
ROUTERS = ("r0:1", "r1:1")
ENGINES_OF_AGENT = 8
# Timeouts of the gateways, s.
DEADLINES = RequestTimeouts(placement_s=10.0, prefill_s=6.0, first_byte_s=6.0, transfer_s=6.0, max_retries=2)
# Maximum duration of a request, s: three attempts, each with a placement, the slices of a prompt and the answer.
ANSWERED_WITHIN_S = 150.0
POLICIES = ("unified", "foresight", "lmetric", "round_robin", "elastic")
# Begin of the names of sessions that have one request, which is their last.
LAST = "last-"
_TEXT = re.compile(r'"text":"(\d+)"')
_INDEX = re.compile(r'"index":(\d+)')
# Statuses of an answer that was broken off, of one that its client did not wait for, and of any error that is the client's fault.
BROKEN_OFF, NONE, REJECTED = 1, 0, 2
# In a world with ill engines: number of engines, and probabilities of requests that engines reject, that kill them, that have
# several prompts or answers, and that are for an adapter.
ILL_ENGINES, BAD_SHARE, POISON_SHARE, SEVERAL_SHARE, ADAPTER_SHARE = 6, 0.04, 0.008, 0.1, 0.1
# Timeouts of a first byte in such a world, s. The longer one lets routers see that an engine is silent.
FIRST_BYTE_S = (6.0, 30.0)
# Name of an adapter of the first pool that only some of its engines have, in such a world.
ADAPTER = "m-adapter"
# How long after its death by a poisonous prompt an engine starts anew, s.
RESTARTS_AFTER_S = 3.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for."""

    model: str
    prompts: list[list[int]]
    session: str
    output: int
    n: int = 1
    bad: bool = False
    """Whether engines reject it, or die of it."""


class GatewayNode:
    """The gateway processes that run one after the other, and the requests that clients send them."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name = world, name
        self._sent = self._processes = 0
        self.node = Node(name)
        self.client: RouterClient | None = None
        self._shared: SharedContext | None = None
        self._states: dict[str, PoolState] = {}
        self._last: set[str] = set()  # sessions of one request, which is not answered yet

    def start(self) -> None:
        """Start a new process."""
        self.node = Node(self.name)
        self.node.spawn(self._run())

    def _dial(self, address: str) -> Any:
        return Channel(self._world.network, address)

    async def _run(self) -> None:
        self._states = {}
        self._processes += 1
        client = self.client = RouterClient(
            ROUTERS,
            f"{self.name}-{self._processes}",
            tuple,
            2.0,
            on_pools=self._take_pools,
            on_connected=lambda _: None,
            dial=self._dial,
        )
        up = upstream(self._world.network, self._world.engines)
        pools: Any = SimpleNamespace(check_token_count=lambda *_: None)
        self._shared = SharedContext(
            router=client,
            upstream=up,
            engine_ids=EngineIdCache(up),
            releases=KvReleases(up, lambda _: None),
            pools=pools,
            telemetry=GatewayMetrics(TokenCache(1 << 20)),
            timeouts=self._world.timeouts,
            whole_timeouts=self._world.timeouts,
            breakdown=LineLog(None),
            expose_placement=True,
            mark_session_ends=False,
            kept_bodies=MemoryBudget(1 << 20),
        )
        await client.start()

    @property
    def up(self) -> bool:
        """Whether the gateway runs."""
        return self.client is not None

    def kill(self) -> None:
        """Kill the process; clients that wait for an answer see their connections break."""
        self.client = None
        # What a gateway has not reported yet dies with it: these sessions keep their owners until their time to live ends.
        self._world.lost_ends |= self._unconfirmed()
        self._world.network.kill(self.node)

    def _unconfirmed(self) -> set[str]:
        """Return the sessions whose last requests are not answered, or whose ends not all owners have confirmed."""
        ends = self._shared.router._session_ends if self._shared is not None else SessionEnds()
        return self._last | {name for (_, name), end in ends._ends.items() if not end.done.issuperset(MODELS)}

    def _take_pools(self, pools: Sequence[placement_pb2.Pool]) -> None:
        self._states = {pool.model: PoolState(pool) for pool in pools}

    async def begin_session(self, session: str, model: str, tokens: list[int], output: int) -> int:
        """Send the first request of a session; return the status of its answer, NONE if the gateway died before."""
        self._sent += 1
        asked = Asked(model, [tokens], session, output)
        work = self.node.spawn(self._answer(f"{self.name}-{self._sent}", asked, 0.0))
        await asyncio.wait([work])
        return NONE if work.cancelled() else work.result()

    async def ask_badly(self, model: str, *, poison: bool) -> int:
        """Send a request that kills the engines which run it (`poison`), or that engines reject."""
        self._sent += 1
        tokens = self._world.prompt()[1]
        asked = Asked(model, [self._world.poison(tokens) if poison else [BAD, *tokens]], "", 8, bad=True)
        status: int = await self.node.spawn(self._answer(f"{self.name}-{self._sent}", asked, 0.0))
        return status

    async def ask(self, leaves_after_s: float = 0.0, needs_within_s: float = 0.0) -> int:
        """Send a client's request; return the status of its answer, NONE if there was none.

        `leaves_after_s`: the client disconnects then (0: it stays). `needs_within_s`: TTFT deadline (0: none). Raises
        InvariantViolation if there is no answer after ANSWERED_WITHIN_S.
        """
        self._sent += 1
        asked = self._world.asked()
        if is_last := _is_last(f"{self.name}-{self._sent}"):
            session = asked.session if not asked.session or self._sent % 2 else f"{LAST}{self.name}-{self._sent}"
            asked = replace(asked, session=session)
        work = self.node.spawn(self._answer(f"{self.name}-{self._sent}", asked, needs_within_s, is_last=is_last))
        loop = asyncio.get_running_loop()
        began = loop.time()
        done, _ = await asyncio.wait([work], timeout=leaves_after_s or ANSWERED_WITHIN_S)
        if not done:
            if not leaves_after_s:
                raise InvariantViolation(f"{self.name}-{self._sent} has no answer after {loop.time() - began:.0f} s")
            work.cancel()
            await asyncio.wait([work])
        return 0 if work.cancelled() else work.result()

    async def _answer(
        self,
        request_id: str,
        asked: Asked,
        needs_within_s: float,
        *,
        is_last: bool = False,
    ) -> int:
        shared, model, session = self._shared, asked.model, asked.session
        pool = MODELS[0] if model == ADAPTER else model
        if shared is None or (state := self._states.get(pool)) is None:
            if shared is not None:
                self._world.lives.unknown(model)
            return 503
        stream = self._world.rng.random() < 0.5
        several = len(asked.prompts) > 1
        tokens = asked.prompts[0]
        fields: dict[str, Any] = {"model": model, "prompt": asked.prompts if several else tokens}
        fields |= {"max_tokens": asked.output, "stream": stream} | ({"n": asked.n} if asked.n > 1 else {})
        raw = msgspec.json.encode(fields)
        # Values that are not light are worked on in threads, which virtual time does not have.
        call = parse(Endpoint.COMPLETION, raw, light_body=decode_light(raw))
        obstacle = transfer_obstacle(call)
        placement = placement_pb2.PlacementRequest(
            request_id=request_id,
            model=model,
            session_id=session,
            input_tokens=sum(map(len, asked.prompts)),
            longest_prompt_tokens=max(map(len, asked.prompts)),
            max_output_tokens=asked.output,
            sliceable_tokens=0 if several else len(tokens),
            single_instance=bool(obstacle),
            tenant=self._world.rng.choice("ab") if not session else "a",
            # 4 is a class that only a newer gateway could send.
            priority=self._world.rng.randrange(5),  # type: ignore[arg-type]
            weight=self._world.rng.randrange(4),
            parkable=True,
        )
        if call.sequences > 1:
            placement.sequences, placement.sequence_tokens = call.sequences, placement.input_tokens * asked.n
        lora = "" if model == pool else model
        set_keys(placement, array("Q", prompt_keys(tokens, pool, lora)))
        writer: Any = ResponseWriter()
        received_at = asyncio.get_running_loop().time()
        context = RequestContext(
            request_id=request_id,
            client_id=request_id,
            call=call,
            state=state,
            lora=lora,
            client=ANYONE,
            headers=Headers(),
            placement=placement,
            transfer_obstacle=obstacle,
            inline_kv_transfer=supports_inline_kv_transfer(call),
            ids=None if several else array("I", tokens),
            exact_tokens=0 if several else len(tokens),
            upstream_headers={"X-Request-ID": request_id},
            received_at=received_at,
            key_charge=KeyCharge(),
            trace=None,
            first_token_by=received_at + needs_within_s if needs_within_s else None,
            ends_session=is_last and bool(session),
        )
        self._last |= {session} if session.startswith(LAST) else set()
        request = Request("POST", "/v1/completions", "", Headers(), writer, Holding(MemoryBudget(1 << 30)))
        try:
            answer = await RequestRunner(shared, context, request).run()
        except ApiRequestError as error:
            if error.status == 504 and not needs_within_s:
                raise InvariantViolation(f"{request_id} was refused as too late: {error.message}") from None
            return REJECTED if asked.bad else error.status
        finally:
            self._last.discard(session)
        if answer is not None:
            if answer.status == 200 and "choices" not in msgspec.json.decode(answer.body):
                raise InvariantViolation(f"{request_id} got {answer.body!r} as an answer")
            return REJECTED if asked.bad else answer.status
        dialects = {engine.traits.dialect for engine in self._world.engines.values() if engine.model == pool}
        answers = [answers_to(asked.prompts, asked.n, asked.output, dialect) for dialect in dialects]
        return _streamed(request_id, writer, answers)


class World:
    """The whole fleet on the running event loop."""

    def __init__(
        self,
        rng: random.Random,
        declared: Declared = AS_BUILT,
        policy: str = "",
        *,
        engines: int = 4,
        capacity_blocks: int = CAPACITY_BLOCKS,
        router_settings: Mapping[str, Any] | None = None,
        check_each: int = 1,
        ill: bool = False,
        all_life_checks: bool = False,
    ) -> None:
        """Build a fleet of `engines` engines that stands for one of `declared` size, placed by `policy`.

        An empty `policy` is drawn, and so is the size of the hold queue. `router_settings` replace those of the routers. `ill`:
        engines and clients' requests of several kinds are drawn, and there are ILL_ENGINES engines. `all_life_checks`: as
        LifeWatch.all_checks.
        """
        self.router_settings = dict(router_settings or {})
        self.rng = rng
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.on_turn = self._turned
        self.violations: list[str] = []
        """Violated invariants that were found outside the routers' own code."""
        self.check_each = check_each
        """After how many events a router's own invariants are checked; 0: never."""
        self.disturbances = Disturbances()
        self.leases = LeaseWatch(LEASE_S, self.disturbances, self.violations.append)
        self.network = Network(rng)
        self.redis = virtual_store.VirtualRedis()
        self.both_since: dict[str, float] = {}
        """Pool -> since when two routers have placed in it, s."""
        self.placed_at: defaultdict[str, dict[CheckedRouter, float]] = defaultdict(dict)
        """Pool -> when each router placed last in it while another one would place, s."""
        self.policy = policy or rng.choice(POLICIES)
        self.queue_size = 256 if policy else rng.choice((2, 256))
        layerwise = rng.random() < 0.5
        engines = ILL_ENGINES if ill else engines
        self.odd_requests = ill
        """Whether clients send requests that engines reject, that kill them, and so on."""
        self.timeouts = replace(DEADLINES, first_byte_s=rng.choice(FIRST_BYTE_S)) if ill else DEADLINES
        self._poisons = 0
        names = [f"e{at}:1" for at in range(engines)]
        self.engines = {
            name: Engine(
                name,
                MODELS[at % 2],
                self.network,
                layerwise=layerwise,
                # One of a pool's engines has no connector package.
                tells=at % ENGINES_OF_AGENT != 3,
                capacity_blocks=capacity_blocks,
                traits=traits,
            )
            for at, (name, traits) in enumerate(zip(names, self._traits(engines, ill=ill), strict=True))
        }
        self.lives = LifeWatch(self.engines, self.violations.append, all_life_checks)
        for engine in self.engines.values():
            engine.peers = list(self.engines.values())
            engine.on_request, engine.on_poison = self.lives.arrived, self._dies_of_poison
        self.routers = {address: RouterNode(self, address) for address in ROUTERS}
        self.gateways = {name: GatewayNode(self, name) for name in ("g0", "g1")}
        agents = max(engines // ENGINES_OF_AGENT, 2)
        self.agents = {
            f"a{at}": Agent(f"a{at}", self.network, list(self.engines.values())[at::agents], list(ROUTERS))
            for at in range(agents)
        }
        for agent in self.agents.values():
            agent.on_start = self._agent_started
        self.charges = Charges(
            loop, declared, pools=len(MODELS), engines=engines, as_it_is=capacity_blocks != CAPACITY_BLOCKS
        )
        self.answers: Counter[int] = Counter()
        self.lost_ends: set[str] = set()
        """Sessions of one request whose end died with its gateway."""
        self.chores: list[asyncio.Task[None]] = []
        self._texts = [[rng.randrange(1_000) for _ in range(320)] for _ in range(6)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the fleet inside the block: start all nodes, and kill them at the end."""

        def from_url(url: str, *, socket_timeout: float, **_: Any) -> virtual_store.Client:
            return virtual_store.Client(self.network, self.redis, socket_timeout, self.charges)

        if self.charges.declared.sessions:
            for model in MODELS:
                names = [engine.instance_id for engine in self.engines.values() if engine.model == model]
                sessions = {f"{PREBUILT}{at}": names[at % len(names)] for at in range(PREBUILT_SESSIONS)}
                self.redis.prebuild(model, sessions)
        with (
            self.charges.charging(),
            mock.patch.object(redis.asyncio.Redis, "from_url", from_url),
        ):
            everything: list[Any] = [*self.routers.values(), *self.agents.values(), *self.gateways.values()]
            for part in everything:
                part.start()
            yield
            for part in everything:
                self.network.kill(part.node)

    def _traits(self, engines: int, *, ill: bool) -> list[Traits]:
        """Draw what each engine has alone. Of a pool's engines at least one has none of it but an adapter."""
        traits = [Traits() for _ in range(engines)]
        if ill:
            rng = self.rng
            traits[4].dialect, traits[5].dialect = int(rng.random() < 0.4), int(rng.random() < 0.4)
            for at in (2, 3):
                traits[at].context = rng.choice((CONTEXT, 200))
            for at in (0, rng.choice((2, 4))):
                traits[at].adapters = (ADAPTER,)
            traits[rng.randrange(engines)].silent_events = rng.random() < 0.3
        return traits

    def _agent_started(self) -> None:
        self.lives.agent_started_at = asyncio.get_running_loop().time()

    def _dies_of_poison(self, engine: Engine, tokens: list[int]) -> None:
        self.lives.died(engine, tokens)
        # Not by a task of the engine, which dies.
        asyncio.get_running_loop().call_later(RESTARTS_AFTER_S, self.restart, engine, context=NETWORK_CONTEXT)
        engine.kill()

    def restart(self, engine: Engine) -> None:
        """Start a new process of an engine unless one runs."""
        if not engine.up:
            engine.start()

    def live_routers(self) -> list[CheckedRouter]:
        """Return the routers that run."""
        return [node.router for node in self.routers.values() if node.router is not None]

    def _turned(self, owner: object, begun: float, seconds: float) -> None:
        if any(node.node is owner for node in self.routers.values()):
            assert isinstance(owner, Node)
            if wrong := invariants.check_turn(owner, begun, seconds):
                self.violations.append(wrong)

    def prompt(self) -> tuple[str, list[int], str]:
        """Draw a model, a prompt that shares its beginning with others, and its session."""
        at = self.rng.randrange(len(self._texts))
        length = self.rng.randint(20, 320)
        own = self.rng.random() < 0.3
        tokens = self._texts[at][:length] + ([self.rng.randrange(1_000) for _ in range(40)] if own else [])
        return MODELS[at % 2], tokens, "" if own else f"s{at}"

    def poison(self, tokens: list[int]) -> list[int]:
        """Return a prompt that kills the engines which run it; its second token is its number."""
        self._poisons += 1
        return [POISON, self._poisons, *tokens]

    def asked(self) -> Asked:
        """Draw what a client asks for."""
        rng = self.rng
        model, tokens, session = self.prompt()
        output = rng.randint(1, 40)
        if not self.odd_requests:
            return Asked(model, [tokens], session, output)
        kind = rng.random()
        if (kind := kind - BAD_SHARE) < 0.0:
            return Asked(model, [[BAD, *tokens]], "", output, bad=True)
        if (kind := kind - POISON_SHARE) < 0.0:
            return Asked(model, [self.poison(tokens)], "", output, bad=True)
        if (kind := kind - SEVERAL_SHARE) < 0.0:
            others = [[rng.randrange(1_000) for _ in range(rng.randint(20, 100))] for _ in range(rng.randrange(3))]
            return Asked(model, [tokens, *others], session, output, n=rng.choice((1, 2, 3)))
        if kind < ADAPTER_SHARE and model == MODELS[0]:
            return Asked(ADAPTER, [tokens], session and f"{session}-adapter", output)
        return Asked(model, [tokens], session, output)

    def end_sessions(self) -> None:
        """End the sessions that all clients share, by one of the gateways."""
        client = self.gateways["g0"].client or self.gateways["g1"].client
        assert client is not None
        for at in range(len(self._texts)):
            client.end_session("a", f"s{at}")
            client.end_session("a", f"s{at}-adapter")

    async def load(self, until: float) -> None:
        """Send clients' requests until `until`; return when all are answered. Some clients leave early, some have deadlines."""
        loop = asyncio.get_running_loop()
        asking: set[asyncio.Task[int]] = set()
        while loop.time() < until:
            await asyncio.sleep(self.rng.expovariate(6.0))
            gateway = self.gateways[self.rng.choice(("g0", "g1"))]
            leaves = self.rng.uniform(0.01, 2.0) if self.rng.random() < 0.1 else 0.0
            needs = self.rng.uniform(0.05, 3.0) if self.rng.random() < 0.2 else 0.0
            asking.add(asyncio.create_task(gateway.ask(leaves, needs)))
        for task in asking:
            self.answers[await task] += 1


def _is_last(request_id: str) -> bool:
    """Return whether a request is the last of its session: one of two. Not drawn, so that the draws of a seed stay."""
    return crc32(request_id.encode()) % 2 == 0


def _streamed(request_id: str, writer: ResponseWriter, answers: list[list[list[int]]]) -> int:
    """Return 200 for a whole stream, BROKEN_OFF for one that reported its failure. Raises InvariantViolation for any other, and
    for one with other texts than all those of one of `answers`, which have the tokens of each sequence."""
    events = writer.body.decode().split("\n\n")[:-1]
    done = events.count("data: [DONE]")
    texts: list[list[int]] = [[] for _ in answers[0]]
    for event in events:
        if found := _TEXT.search(event):
            index = _INDEX.search(event)
            texts[int(index[1]) if index else 0].append(int(found[1]))
    failed = [event for event in events if '"error"' in event or not event.endswith(("}", "[DONE]"))]
    if not any(
        all(text == tokens[: len(text)] for text, tokens in zip(texts, answer, strict=True)) for answer in answers
    ):
        raise InvariantViolation(f"{request_id} got the tokens {texts}, not {' or '.join(map(str, answers))}")
    if writer.aborted or (failed and writer.ended):
        return BROKEN_OFF
    whole = [len(text) for text in texts] == [len(tokens) for tokens in answers[0]]
    if failed or not writer.ended or (whole, done, events[-1]) != (True, 1, "data: [DONE]"):
        raise InvariantViolation(f"{request_id} got {texts} of {len(answers[0][0])} tokens each: {events[-2:]}")
    return 200
