"""A router in this process that listens on a free port, and clients of its services."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from google.protobuf import any_pb2
from grpc_status import rpc_status

from pointsman.agent.v1 import agent_pb2, agent_pb2_grpc
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2, placement_pb2_grpc
from pointsman_agent.core.key_report_sequence import CHUNK_KEYS
from pointsman_common.core.addresses import parse_address
from pointsman_common.core.block_keys import KEY_SCHEME, digest_of
from pointsman_common.io.auth import bearer
from pointsman_common.io.channel import open_channel
from pointsman_common.io.settings import Tokens
from pointsman_gateway.core.known_fleet import KnownFleet
from pointsman_router.core.policy.registry import POLICIES, Policies
from pointsman_router.io.main import RouterServer
from pointsman_router.io.settings import RouterSettings
from tests.support.instances import IN_STEP
from tests.support.waiting import WITHIN_S, eventually


def details_of(error: grpc.aio.AioRpcError) -> Sequence[any_pb2.Any]:
    """Return the details in the status of a failed call."""
    call: Any = error
    status = rpc_status.from_call(call)
    assert status is not None
    details: Sequence[any_pb2.Any] = status.details
    return details


class Client:
    """Stubs of all services, which authenticate with `token`."""

    def __init__(self, channel: grpc.aio.Channel, token: str = "") -> None:
        self.metadata = bearer(token)
        self.agents = agent_pb2_grpc.AgentServiceStub(channel)
        self.placement = placement_pb2_grpc.PlacementServiceStub(channel)
        self.fleet = fleet_pb2_grpc.FleetServiceStub(channel)

    async def instances(self) -> dict[str, fleet_pb2.InstanceStatus]:
        answer = await self.fleet.ListInstances(fleet_pb2.ListInstancesRequest(), metadata=self.metadata)
        return {instance.instance.instance_id: instance for instance in answer.instances}


class Report:
    """One agent's stream for one instance. `observer` lists the router's instances, for agents whose token may not."""

    def __init__(self, client: Client, observer: Client | None = None) -> None:
        self._observer = observer or client
        self.call = client.agents.Report(None, metadata=client.metadata)

    async def send(self, **kind: Any) -> None:
        await self.call.write(agent_pb2.ReportRequest(**kind))

    async def read(self) -> agent_pb2.ReportResponse:
        # Not wait_for(): before Python 3.12 it loses a cancellation that arrives together with the message.
        async with asyncio.timeout(WITHIN_S):
            message = await self.call.read()
        assert isinstance(message, agent_pb2.ReportResponse), "the stream ended"
        return message

    async def hello(
        self,
        name: str = "a",
        *,
        scheme: str = KEY_SCHEME,
        oldest: int = 1,
        latest: int = 0,
        agent_id: str = "",
        **changes: Any,
    ) -> None:
        values: dict[str, Any] = {
            "instance_id": name,
            "incarnation": "1",
            "url": f"http://{name}",
            "model": "m",
            "block_size": 16,
            "prefix_mode": agent_pb2.PREFIX_MODE_EXACT,
        }
        instance = agent_pb2.Instance(**{**values, **changes})
        await self.send(
            hello=agent_pb2.Hello(
                instance=instance,
                key_scheme=scheme,
                oldest_seq=oldest,
                latest_seq=latest,
                report_interval_ms=60_000,  # only the test sends reports
                agent_id=agent_id,
            )
        )

    async def snapshot(self, keys: list[int]) -> None:
        await self.send(snapshot_begin=agent_pb2.SnapshotBegin(seq=0))
        for start in range(0, len(keys), CHUNK_KEYS):
            chunk = agent_pb2.SnapshotChunk(tier=agent_pb2.TIER_DEVICE, keys=keys[start : start + CHUNK_KEYS])
            await self.send(snapshot_chunk=chunk)
        await self.send(snapshot_end=agent_pb2.SnapshotEnd(seq=0, key_count=len(keys), digest=digest_of(1, keys)))
        await self.load()

    async def load(self) -> None:
        await self.send(load=agent_pb2.Load(healthy=True, running=1, kv_usage=0.25))

    async def join(self, name: str = "a", keys: list[int] | None = None, **changes: Any) -> None:
        """Send hello and snapshot, and wait until the router lists the instance as in step; later streams find it so."""
        await self.hello(name, **changes)
        assert (await self.read()).welcome.snapshot
        await self.snapshot(keys or [])

        async def ready() -> bool:
            return (await self._observer.instances())[name].state in IN_STEP

        await eventually(ready, f"{name} has joined")


def gateway_hello(gateway_id: str, **fields: Any) -> placement_pb2.GatewayHello:
    """Return a hello whose secret depends only on the id, so that equal ids are one gateway."""
    return placement_pb2.GatewayHello(gateway_id=gateway_id, secret=gateway_id.encode().ljust(16), **fields)


class Session:
    """One gateway's stream to the router."""

    def __init__(self, client: Client, gateway_id: str = "g") -> None:
        self.gateway_id = gateway_id
        self.secret = gateway_hello(gateway_id).secret
        self.call = client.placement.Session(None, metadata=client.metadata)
        self._unread: deque[placement_pb2.SessionResponse] = deque()
        self._known_fleet = KnownFleet(placement_pb2.Fleet())

    async def hello(self, *open_streams: placement_pb2.OpenStream) -> placement_pb2.GatewayWelcome:
        hello = placement_pb2.GatewayHello(gateway_id=self.gateway_id, secret=self.secret, open_streams=open_streams)
        await self.send(hello=hello)
        return (await self.read("welcome")).welcome

    async def send(self, **kind: Any) -> None:
        await self.call.write(placement_pb2.SessionRequest(**kind))

    async def read(self, *kinds: str) -> placement_pb2.SessionResponse:
        """Return the next message of these kinds; ignore others."""
        while True:
            while self._unread:
                message = self._unread.popleft()
                if message.WhichOneof("kind") in kinds:
                    return message
            async with asyncio.timeout(WITHIN_S):
                read = await self.call.read()
            assert isinstance(read, placement_pb2.SessionResponse), "the stream ended"
            self._unread.extend(read.batch.responses if read.HasField("batch") else (read,))

    async def fleet(self) -> KnownFleet:
        """Return the fleet as of the next message that describes or updates it."""
        message = await self.read("fleet", "fleet_update")
        if message.HasField("fleet"):
            self._known_fleet = KnownFleet(message.fleet)
        else:
            self._known_fleet.apply(message.fleet_update)
        return self._known_fleet

    async def place(self, request_id: str, tokens: int = 100, **changes: Any) -> placement_pb2.Placement:
        """Return a request's placement. Retries while the pool's owner changes, as gateways do; any other refusal is an error."""
        values: dict[str, Any] = {"request_id": request_id, "model": "m", "input_tokens": tokens} | changes
        request = placement_pb2.PlacementRequest(**values)
        async with asyncio.timeout(WITHIN_S):
            while True:
                await self.send(place=request)
                answer = await self.read("placement", "refusal")
                while not answer.HasField("placement") and answer.refusal.request_id != request_id:
                    answer = await self.read("placement", "refusal")
                if answer.HasField("placement"):
                    return answer.placement
                assert answer.refusal.not_serving, answer.refusal.message
                await asyncio.sleep(0.05)

    async def finish(self, request_id: str, **changes: Any) -> None:
        values = {"outcome": placement_pb2.OUTCOME_OK, **changes}
        finished = placement_pb2.Finished(request_id=request_id, **values)
        await self.send(finished=finished)


@asynccontextmanager
async def running(
    tokens: Tokens | None = None, policies: Policies = POLICIES, **changes: Any
) -> AsyncIterator[tuple[RouterServer, Client]]:
    """Run a router that has `policies`, and yield it with a client. With tokens, the client uses the operator's."""
    values: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "metrics_listen": "",
        "redis_url": "",
        "gateway_lease_s": 1.0,
        "startup_wait_s": 0.0,
    }
    tokens = tokens or Tokens(agent_token="", gateway_token="", operator_token="", token_dir=None)
    server = RouterServer(RouterSettings(**{**values, **changes}), tokens, policies)
    await server.start()
    try:
        async with open_channel(str(parse_address(server.settings.listen)._replace(port=server.port))) as channel:
            yield server, Client(channel, tokens.of("operator"))
    finally:
        await server.stop()
