"""A fleet of two pools, two routers, two gateways and two agents, with requests coming in, and what must hold of it."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
from pydantic import SecretStr

from pointsman.agent.v1 import agent_pb2
from pointsman.common.core.block_keys import prompt_keys
from pointsman.gateway.core.api import ApiRequestError, Endpoint, parse
from pointsman.gateway.core.http_message import Headers, Request
from pointsman.gateway.core.memory_budget import Holding, MemoryBudget
from pointsman.gateway.core.pool_state import PoolState
from pointsman.gateway.core.rate_limits import Admission
from pointsman.gateway.core.request.prepare import set_keys
from pointsman.gateway.core.request.request_context import RequestContext
from pointsman.gateway.core.request.request_events import RequestTimeouts
from pointsman.gateway.core.tokens.token_cache import TokenCache
from pointsman.gateway.io.engines.remote_prefill import EngineIdCache, KvReleases
from pointsman.gateway.io.request.request_runner import RequestRunner
from pointsman.gateway.io.request.shared_context import SharedContext
from pointsman.gateway.io.routing import router_stream
from pointsman.gateway.io.routing.router_client import RouterClient
from pointsman.gateway.io.telemetry.line_log import LineLog
from pointsman.gateway.io.telemetry.metrics import GatewayMetrics
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.types import InstanceState
from pointsman.router.io.rpc.agent_service import AgentService
from pointsman.router.io.rpc.placement_service import PlacementService
from pointsman.router.io.runtime import Router
from pointsman.router.io.settings import RouterSettings
from pointsman.router.io.store import redis_store
from pointsman.router.v1 import placement_pb2
from tests.support.virtual import store as virtual_store
from tests.support.virtual.engines import Agent, Engine
from tests.support.virtual.http import ResponseWriter, upstream
from tests.support.virtual.network import Channel, Method, Network, Node

MODELS = ("m", "n")
ROUTERS = ("r0:1", "r1:1")
LEASE_S = 1.0
DEADLINES = RequestTimeouts(placement_s=10.0, prefill_s=6.0, first_byte_s=6.0, transfer_s=6.0, max_retries=2)
# Whatever happens, a request is over by then: three attempts, each of them a placement, the slices of a prompt and the answer.
ANSWERED_WITHIN_S = 150.0
POLICIES = ("unified", "foresight", "lmetric", "round_robin", "elastic")
# So that a fleet this small slices, holds, and offloads.
SETTINGS: dict[str, dict[str, float | bool | str]] = {
    "foresight": {"slice_factor": 0.5, "slice_min_tokens": 64.0, "light_factor": 0.5},
    "elastic": {"heavy_new_tokens": 32.0, "throughput": 500.0},
}
# Of an answer that was broken off, and of one that nobody waits for.
BROKEN_OFF, NONE = 1, 0


class InvariantViolation(AssertionError):
    """Something that must hold does not."""


class CheckedRouter(Router):
    """A router that is looked into after every event."""

    def submit(self, event: ev.Event) -> list[ev.Effect]:
        """As ever."""
        effects = super().submit(event)
        self.state.check_invariants()
        return effects


class RouterNode:
    """One router process after another at one address."""

    def __init__(self, world: World, address: str) -> None:
        self._world, self._address = world, address
        self._lives = 0
        self._task: asyncio.Task[None] | None = None
        self.node = Node(address)
        self.router: CheckedRouter | None = None

    def start(self) -> None:
        """A new process."""
        self._lives += 1
        self.node = Node(self._address)
        self._task = self.node.spawn(self._run())

    async def _run(self) -> None:
        settings = RouterSettings(
            redis_url=SecretStr("redis://redis"),
            router_id=f"{self._address}-{self._lives}",
            policy=self._world.policy,
            policy_settings=SETTINGS.get(self._world.policy, {}),
            owner_lease_s=LEASE_S,
            gateway_lease_s=5.0,
            lost_instance_s=6.0,
            queue_timeout_s=5.0,
            startup_wait_s=2.0,
            max_requests_per_instance=4,
        )
        router = self.router = CheckedRouter(settings)
        router.store.address = self._address
        services = {
            "/pointsman.router.v1.PlacementService/Session": Method(
                PlacementService(router, lambda *_: True).Session, placement_pb2.SessionRequest.FromString
            ),
            "/pointsman.agent.v1.AgentService/Report": Method(
                AgentService(router, lambda authorization, names, instance: True).Report,
                agent_pb2.ReportRequest.FromString,
            ),
        }
        self._world.network.listen(self._address, self.node, services)
        await router.run()

    async def stop(self) -> None:
        """Go in order, as a rollout has it."""
        router, self.router = self.router, None
        assert self._task is not None
        assert router is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        router.end_sessions()
        router.end_reports()
        await asyncio.sleep(0.3)
        self.kill()

    @property
    def up(self) -> bool:
        """Whether it runs, and is not about to stop."""
        return self.router is not None

    def kill(self) -> None:
        """Go at once."""
        self.router = None
        self._world.network.kill(self.node)


class GatewayNode:
    """One gateway process after another, and the requests that clients send it."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name = world, name
        self._sent = self._processes = 0
        self.node = Node(name)
        self.client: RouterClient | None = None
        self._shared: SharedContext | None = None
        self._states: dict[str, PoolState] = {}

    def start(self) -> None:
        """A new process."""
        self.node = Node(self.name)
        self.node.spawn(self._run())

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
        )
        up = upstream(self._world.network, self._world.engines)
        pools: Any = SimpleNamespace(check_token_count=lambda *_: None)
        self._shared = SharedContext(
            router=client,
            upstream=up,
            bootstraps=EngineIdCache(up),
            releases=KvReleases(up, lambda _: None),
            pools=pools,
            telemetry=GatewayMetrics(TokenCache(1 << 20)),
            timeouts=DEADLINES,
            whole_timeouts=DEADLINES,
            breakdown=LineLog(None),
            expose_placement=True,
        )
        await client.start()

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self.client is not None

    def kill(self) -> None:
        """Go at once; whoever waits for an answer sees the connection break."""
        self.client = None
        self._world.network.kill(self.node)

    def _take_pools(self, pools: Sequence[placement_pb2.Pool]) -> None:
        self._states = {pool.model: PoolState(pool) for pool in pools}

    async def ask(self, leaves_after_s: float = 0.0) -> int:
        """A request of a client that perhaps leaves; the status of its answer, 0 where there was none."""
        rng = self._world.rng
        self._sent += 1
        model, tokens, session = self._world.prompt()
        work = self.node.spawn(self._answer(f"{self.name}-{self._sent}", model, tokens, session, rng.randint(1, 40)))
        loop = asyncio.get_running_loop()
        began = loop.time()
        done, _ = await asyncio.wait([work], timeout=leaves_after_s or ANSWERED_WITHIN_S)
        if not done:
            if not leaves_after_s:
                raise InvariantViolation(f"{self.name}-{self._sent} has no answer after {loop.time() - began:.0f} s")
            work.cancel()
            await asyncio.wait([work])
        return 0 if work.cancelled() else work.result()

    async def _answer(self, request_id: str, model: str, tokens: list[int], session: str, output: int) -> int:
        shared = self._shared
        if shared is None or model not in self._states:
            return 503
        stream = self._world.rng.random() < 0.5
        body = msgspec.json.encode({"model": model, "prompt": tokens, "max_tokens": output, "stream": stream})
        placement = placement_pb2.PlacementRequest(
            request_id=request_id,
            model=model,
            session_id=session,
            input_tokens=len(tokens),
            max_output_tokens=output,
            sliceable_tokens=len(tokens),
        )
        set_keys(placement, array("Q", prompt_keys(tokens, model)))
        writer: Any = ResponseWriter()
        context = RequestContext(
            request_id=request_id,
            call=parse(Endpoint.COMPLETION, body),
            state=self._states[model],
            placement=placement,
            transfer_obstacle="",
            ids=array("I", tokens),
            exact_tokens=len(tokens),
            upstream_headers={"X-Request-ID": request_id},
            received_at=asyncio.get_running_loop().time(),
            admission=Admission(),
            trace=None,
        )
        request = Request("POST", "/v1/completions", "", Headers(), writer, Holding(MemoryBudget(1 << 30)))
        try:
            answer = await RequestRunner(shared, context, request).run()
        except ApiRequestError as error:
            return error.status
        return answer.status if answer is not None else _streamed(request_id, writer, output)


class World:
    """All of it. Belongs to the running loop."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.network = Network(rng)
        self.redis = virtual_store.VirtualRedis()
        self.policy = rng.choice(POLICIES)
        layerwise = rng.random() < 0.5
        self.engines = {
            name: Engine(name, MODELS[at % 2], self.network, layerwise=layerwise)
            for at, name in enumerate(("e0:1", "e1:1", "e2:1", "e3:1"))
        }
        for one in self.engines.values():
            one.peers = list(self.engines.values())
        self.routers = {address: RouterNode(self, address) for address in ROUTERS}
        self.gateways = {name: GatewayNode(self, name) for name in ("g0", "g1")}
        engines = list(self.engines.values())
        self.agents = {f"a{at}": Agent(f"a{at}", self.network, engines[at::2], list(ROUTERS)) for at in range(2)}
        self.answers: Counter[int] = Counter()
        self.chores: list[asyncio.Task[None]] = []
        self._texts = [[rng.randrange(1_000) for _ in range(320)] for _ in range(6)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Everything is started inside the block."""

        def from_url(url: str, *, socket_timeout: float, **_: Any) -> virtual_store.Client:
            return virtual_store.Client(self.network, self.redis, socket_timeout)

        with (
            mock.patch.object(redis_store.redis.asyncio.Redis, "from_url", from_url),
            mock.patch.object(router_stream, "open_channel", lambda address: Channel(self.network, address)),
        ):
            everything: list[Any] = [*self.routers.values(), *self.agents.values(), *self.gateways.values()]
            for one in everything:
                one.start()
            yield
            for one in everything:
                self.network.kill(one.node)

    def prompt(self) -> tuple[str, list[int], str]:
        """A model, a prompt that shares its beginning with others, and its session."""
        at = self.rng.randrange(len(self._texts))
        length = self.rng.randint(20, 320)
        own = self.rng.random() < 0.3
        tokens = self._texts[at][:length] + ([self.rng.randrange(1_000) for _ in range(40)] if own else [])
        return MODELS[at % 2], tokens, "" if own else f"s{at}"

    async def load(self, until: float) -> None:
        """Requests from clients until that moment, some of whom leave; returns when all have their answers."""
        loop = asyncio.get_running_loop()
        asking: set[asyncio.Task[int]] = set()
        while loop.time() < until:
            await asyncio.sleep(self.rng.expovariate(6.0))
            gateway = self.gateways[self.rng.choice(("g0", "g1"))]
            leaves = self.rng.uniform(0.01, 2.0) if self.rng.random() < 0.1 else 0.0
            asking.add(asyncio.create_task(gateway.ask(leaves)))
        for task in asking:
            self.answers[await task] += 1

    # ---- what must hold ----

    def check_at_rest(self) -> None:
        """Some time after all is well again and the last request has ended. Raises InvariantViolation."""
        for gateway in self.gateways.values():
            assert gateway.client is not None
            _equal(gateway.client.open_count, 0, f"open requests of {gateway.name}")
            _equal(len(gateway.client._requests), 0, f"remembered requests of {gateway.name}")
        for model in MODELS:
            owners = [node.router.settings.router_id for node in self._live() if node.router.state.owned.owns(model)]
            if len(owners) != 1:
                raise InvariantViolation(f"{model} is owned by {owners or 'nobody'}")
            _equal(self.redis.hash(f"pointsman:{{default:{model}}}:open"), {}, f"reservations kept of {model}")
        for node in self._live():
            self._check_router(node)

    def _live(self) -> list[Any]:
        return [node for node in self.routers.values() if node.router is not None]

    def _check_router(self, node: Any) -> None:
        state, name = node.router.state, node.router.settings.router_id
        _equal(state.degraded, False, f"{name} degraded")
        _equal([one.request_id for one in state.reservations], [], f"reservations of {name}")
        _equal(len(state.held_requests.queue), 0, f"held requests of {name}")
        for engine in self.engines.values():
            record = state.instances.get(engine.instance_id)
            if record is None or record.info.incarnation != engine.incarnation:
                raise InvariantViolation(f"{name} does not know {engine.incarnation}")
            _equal(record.state, InstanceState.READY, f"{engine.instance_id} at {name}")
            missing = [key for key in engine.cached_keys() if not state.index.holds(engine.instance_id, key)]
            _equal(missing, [], f"blocks of {engine.instance_id} that {name} does not know")
            _equal(
                state.index.count(engine.instance_id), len(engine.cache), f"blocks of {engine.instance_id} at {name}"
            )


def _streamed(request_id: str, writer: ResponseWriter, output: int) -> int:
    """200 for a stream that is whole, BROKEN_OFF for one that told of its failure. Raises InvariantViolation for any other."""
    events = writer.body.decode().split("\n\n")[:-1]
    tokens, done = sum('"text"' in event for event in events), events.count("data: [DONE]")
    failed = [event for event in events if '"error"' in event]
    if writer.aborted or (failed and writer.ended):
        return BROKEN_OFF
    if failed or not writer.ended or (tokens, done, events[-1]) != (output, 1, "data: [DONE]"):
        raise InvariantViolation(f"{request_id} got {tokens} tokens of {output}: {events[-2:]}")
    return 200


def _equal(found: object, wanted: object, what: str) -> None:
    if found != wanted:
        raise InvariantViolation(f"{what}: {found}, not {wanted}")
