"""The control plane as real processes in front of real engines: Redis, a router, an agent and a gateway, with auth tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import grpc
import openai
from google.protobuf.json_format import MessageToDict

from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc
from pointsman_common.io.auth import bearer
from pointsman_common.io.channel import CHANNEL_OPTIONS
from tests.support.engines.servers import Engine
from tests.support.http_request import serves
from tests.support.instances import IN_STEP, counters
from tests.support.processes.pointsman import pointsman_process
from tests.support.processes.process import Process, free_port
from tests.support.processes.redis import redis_answers, redis_command
from tests.support.repository import REPOSITORY
from tests.support.waiting import until

READY_WITHIN_S = 120.0
SETTLE_WITHIN_S = 60.0
CALL_WITHIN_S = 30.0


@dataclass
class ControlPlane:
    """The processes of Pointsman in front of `engines`. `folder` holds logs and the agent's state.

    Tests may stop and start processes, and must leave all running.
    """

    engines: Sequence[Engine]
    folder: Path
    router_flags: Mapping[str, object] = field(default_factory=dict)
    agent_flags: Mapping[str, object] = field(default_factory=dict)
    gateway_flags: Mapping[str, object] = field(default_factory=dict)
    target_of: Callable[[Engine], str] = attrgetter("target")  # the engine's address for the agent's settings
    redis_port: int = field(default_factory=free_port)
    router_port: int = field(default_factory=free_port)
    gateway_port: int = field(default_factory=free_port)
    tokens: dict[str, str] = field(
        default_factory=lambda: {role: secrets.token_hex(8) for role in ("agent", "gateway", "operator")}
    )
    redis: Process = field(init=False)
    router: Process = field(init=False)
    agent: Process = field(init=False)
    gateway: Process = field(init=False)
    _channel: grpc.Channel = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.redis = Process("redis", redis_command(self.redis_port, self.folder), self.folder / "redis.log")
        self.router = self._service(
            "router",
            {
                "--listen": self.router_address,
                "--redis-url": f"redis://127.0.0.1:{self.redis_port}/0",
                "--metrics-listen": f"127.0.0.1:{free_port()}",
                "--gateway-lease-s": 5,
                **self.router_flags,
            },
            roles=("agent", "gateway", "operator"),
        )
        self.agent = self._service(
            "agent",
            {
                "--routers": self.router_address,
                "--state-dir": self.state_dir,
                "--metrics-listen": f"127.0.0.1:{free_port()}",
                "--scrape-interval-s": 0.25,
                **self.agent_flags,
            },
            # Ranks of one server have one address.
            *(part for target in dict.fromkeys(map(self.target_of, self.engines)) for part in ("--engines", target)),
            roles=("agent",),
        )
        self.gateway = self._service(
            "gateway",
            {
                "--listen": f"127.0.0.1:{self.gateway_port}",
                "--routers": self.router_address,
                **self.gateway_flags,
            },
            "--client-cache-salt",
            roles=("gateway",),
        )
        self._channel = grpc.insecure_channel(self.router_address, options=CHANNEL_OPTIONS)

    @property
    def router_address(self) -> str:
        """HOST:PORT of the router's gRPC services."""
        return f"127.0.0.1:{self.router_port}"

    @property
    def gateway_url(self) -> str:
        """Base URL of the gateway without a trailing slash."""
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def state_dir(self) -> Path:
        """The agent's state folder, with its copies of prefix caches."""
        return self.folder / "agent-state"

    def start(self) -> None:
        """Start all processes; wait until the gateway serves and the router knows every engine. On failure all are stopped."""
        try:
            self.redis.start()
            self.redis.wait_ready(lambda: redis_answers(self.redis_port), within_s=READY_WITHIN_S)
            self.router.start()
            self.agent.start()
            self.start_gateway()
            self.wait_settled()
        except AssertionError as failed:
            tails = "\n".join(part.tail(25) for part in self.parts if part.log.exists())
            self.stop()
            raise AssertionError(f"{failed}\n{tails}") from None
        except BaseException:
            self.stop()
            raise

    @contextmanager
    def another_gateway(self, name: str, **flags: object) -> Iterator[str]:
        """Run a second gateway with other flags inside the block; yield its URL. Asserts that it logs no traceback."""
        url = f"http://127.0.0.1:{free_port()}"
        given = {"--listen": url.removeprefix("http://"), "--routers": self.router_address}
        gateway = self._service(f"gateway-{name}", given | flags, roles=("gateway",), command="gateway")
        gateway.start()
        try:
            gateway.wait_ready(lambda: serves(url), within_s=READY_WITHIN_S)
            yield url
        finally:
            gateway.stop()
        assert "Traceback (most recent" not in gateway.log.read_text(errors="replace"), gateway.tail()

    @contextmanager
    def running(self) -> Iterator[ControlPlane]:
        """Run the control plane inside the block."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    @contextmanager
    def in_step(self) -> Iterator[ControlPlane]:
        """Wait until the control plane is idle and in step with its engines before the block, and idle after it.

        Asserts that no process logs a traceback meanwhile, which is an error that was not handled.
        """
        self.wait_settled()
        self.wait_idle()
        before = self.tracebacks()
        yield self
        self.wait_idle()
        assert self.tracebacks() == before

    def start_gateway(self) -> None:
        """Start the gateway and wait until it serves. Raises ProcessFailure."""
        self.gateway.start()
        self.gateway.wait_ready(lambda: serves(self.gateway_url), within_s=READY_WITHIN_S)

    def stop(self) -> None:
        """Stop all processes that run, clients first."""
        self._channel.close()
        for part in self.parts:
            if part.alive:
                part.stop()

    @property
    def parts(self) -> tuple[Process, ...]:
        """All processes, clients before what they depend on."""
        return (self.gateway, self.agent, self.router, self.redis)

    def tracebacks(self) -> list[str]:
        """Return every traceback in the logs so far, each with the name of its process."""
        return [
            f"{part.name}: {found}"
            for part in self.parts
            for found in re.findall(
                r"Traceback \(most recent.*(?:\n[ \t].*)*(?:\n.+)?", part.log.read_text(errors="replace")
            )
        ]

    # -- the router's answers ---------------------------------------------------------------------------------------------

    @property
    def fleet(self) -> fleet_pb2_grpc.FleetServiceStub:
        """The router's FleetService; calls need `self.metadata`."""
        return fleet_pb2_grpc.FleetServiceStub(self._channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Call metadata of an operator."""
        return bearer(self.tokens["operator"])

    def instances(self) -> dict[str, fleet_pb2.InstanceStatus]:
        """Return the current answer of ListInstances, by instance id."""
        try:
            answer = self._list_instances()
        except grpc.RpcError as error:
            # The router was just killed, and the call used its old connection. The next call makes a new connection.
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            answer = self._list_instances()
        return {status.instance.instance_id: status for status in answer.instances}

    def _list_instances(self) -> fleet_pb2.ListInstancesResponse:
        return self.fleet.ListInstances(
            fleet_pb2.ListInstancesRequest(), timeout=CALL_WITHIN_S, metadata=self.metadata, wait_for_ready=True
        )

    def instance(self, engine: Engine) -> fleet_pb2.InstanceStatus:
        """Return the router's status of one engine. Raises KeyError if the router does not know the engine."""
        return self.instances()[engine.instance_id]

    def decision(self, decision_id: str) -> fleet_pb2.Decision:
        """Return the answer of GetDecision for a decision or request id."""
        request = fleet_pb2.GetDecisionRequest(decision_id=decision_id)
        return self.fleet.GetDecision(request, timeout=CALL_WITHIN_S, metadata=self.metadata).decision

    def finished_decision(self, decision_id: str) -> fleet_pb2.Decision:
        """Like decision(), after the request has ended: gateways report an end only after the client's last byte."""

        def ended() -> fleet_pb2.Decision | None:
            decision = self.decision(decision_id)
            return None if decision.outcome == fleet_pb2.DECISION_OUTCOME_OPEN else decision

        return until(ended, within_s=SETTLE_WITHIN_S, what=f"the end of decision {decision_id}")

    def newest_decision(self) -> fleet_pb2.Decision:
        """Return the newest decision, without candidates; an empty one if there is none."""
        request = fleet_pb2.ListDecisionsRequest(page_size=1)
        decisions = self.fleet.ListDecisions(request, timeout=CALL_WITHIN_S, metadata=self.metadata).decisions
        return decisions[0] if decisions else fleet_pb2.Decision()

    def plan(self, decision_id: str) -> list[fleet_pb2.Decision]:
        """Wait until a request has ended; return all its decisions, from the first to the last part of its plan."""
        asked = fleet_pb2.ListDecisionsRequest(page_size=100)
        asked.filter.request_id = self.finished_decision(decision_id).request_id
        found = self.fleet.ListDecisions(asked, timeout=CALL_WITHIN_S, metadata=self.metadata).decisions
        return list(reversed(found))

    @contextmanager
    def policy(self, name: str, **settings: Any) -> Iterator[None]:
        """Make the router use this policy inside the block."""
        before = self._list_instances().policy
        wanted = fleet_pb2.Policy(name=name)
        wanted.settings.update(settings)
        self._set_policy(wanted)
        try:
            yield
        finally:
            self._set_policy(before)

    def _set_policy(self, policy: fleet_pb2.Policy) -> None:
        request = fleet_pb2.SetPolicyRequest(policy=policy)
        self.fleet.SetPolicy(request, timeout=CALL_WITHIN_S, metadata=self.metadata)

    @contextmanager
    def draining(self, *engines: Engine) -> Iterator[None]:
        """Drain `engines` inside the block."""
        for engine in engines:
            self.drain(engine)
        try:
            yield
        finally:
            for engine in engines:
                self.drain(engine, resume=True)

    def drain(self, engine: Engine, *, resume: bool = False, move: bool = False) -> None:
        """Order a drain. `move`: requests are to leave the engine, too."""
        request = fleet_pb2.DrainRequest(instance_id=engine.instance_id, resume=resume, move=move)
        self.fleet.Drain(request, timeout=CALL_WITHIN_S, metadata=self.metadata)

    # -- waiting -----------------------------------------------------------------------------------------------------------

    def wait_settled(self, *engines: Engine) -> None:
        """Wait until the engines (default: all) are ready at the router, with as many keys as they have cached.

        The number is counted from each engine's own event history, without the agent.
        """
        for engine in engines or self.engines:

            def settled(engine: Engine = engine) -> bool:
                self._assert_alive()
                status = self._find(engine)
                # Counted each time: an engine publishes a step's blocks after its answer.
                return status is not None and status.state in IN_STEP and status.keys == engine.cached_keys()

            try:
                until(settled, within_s=READY_WITHIN_S, what=f"{engine.instance_id} ready with the keys that it has")
            except AssertionError as late:
                known = _plain(self._find(engine))
                raise AssertionError(f"{late}, {engine.cached_keys()}; the router knows {known}") from None

    def wait_idle(self) -> None:
        """Wait until no engine has a running request, and all load counters of the router are 0."""
        busy: Any = None

        def idle() -> bool:
            nonlocal busy
            busy = {
                engine.instance_id: (engine.running(), _plain(self._find(engine)))
                for engine in self.engines
                if engine.running() or any(counters(self.instance(engine)).values())
            }
            return not busy

        try:
            until(idle, within_s=SETTLE_WITHIN_S, what="engines and counters at zero")
        except AssertionError as late:
            raise AssertionError(f"{late}; still {busy}") from None

    def _find(self, engine: Engine) -> fleet_pb2.InstanceStatus | None:
        return self.instances().get(engine.instance_id)

    def _assert_alive(self) -> None:
        for part in (self.redis, self.router, self.agent):
            assert part.alive, f"{part.name} ended\n{part.tail()}"

    # -- clients -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        """Yield the official client, connected to the gateway."""
        with client_of(self.gateway_url) as client:
            yield client

    def _service(
        self, name: str, flags: Mapping[str, object], *more: str, roles: Sequence[str], command: str = ""
    ) -> Process:
        tokens = {f"POINTSMAN_{role.upper()}_TOKEN": self.tokens[role] for role in roles}
        return pointsman_process(name, self.folder, command or name, *more, flags=flags, env=tokens, cwd=REPOSITORY)


@contextmanager
def client_of(url: str) -> Iterator[openai.OpenAI]:
    """Yield the official client of the server at `url`, without retries and without the environment's proxies."""
    with (
        openai.DefaultHttpxClient(trust_env=False, timeout=60) as http,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        yield client


def _plain(status: fleet_pb2.InstanceStatus | None) -> Any:
    return None if status is None else MessageToDict(status, preserving_proto_field_name=True)
