"""Access to every port without credentials, with wrong ones, and with those of another role: TLS and client certificates on gRPC
and on the gateway, agents bound to their instances, reflection, and Redis with users and TLS."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import redis
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pointsman.agent.v1 import agent_pb2_grpc
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.io import proven_streams
from pointsman_common.io.auth import bearer, showing
from pointsman_common.io.channel import CHANNEL_OPTIONS, ReloadingChannel
from pointsman_common.io.settings import Tokens
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.routing.router_client import RouterClient
from pointsman_gateway.io.settings import GatewaySettings
from pointsman_router.io.main import RouterServer
from pointsman_router.io.settings import RouterSettings
from tests.support.certificates import Authority, Signed
from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.process import Process, free_port
from tests.support.router import Client, Report, Session
from tests.support.waiting import eventually
from tools.check_deploy import make_secrets

TOKENS = Tokens(agent_token="A", gateway_token="G", operator_token="O", token_dir=None)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours") / "ca")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs") / "ca")


@asynccontextmanager
async def router(tokens: Tokens = TOKENS, **settings: Any) -> AsyncIterator[str]:
    """A router with tokens on a free port: its address."""
    router_settings = RouterSettings(listen="127.0.0.1:0", metrics_listen="", **settings)
    server = RouterServer(router_settings, tokens)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop()


async def knock(address: str, credentials: grpc.ChannelCredentials | None, token: str) -> str:
    """Return the status of a ListInstances call, UNAVAILABLE if no connection is established."""
    channel = (
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    )
    async with channel:
        client = Client(channel, token)
        try:
            await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest(), metadata=client.metadata, timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"


def dials(ca: Authority, shown: Signed | None = None) -> grpc.ChannelCredentials:
    pair = (shown.key.read_bytes(), shown.cert.read_bytes()) if shown else (None, None)
    return grpc.ssl_channel_credentials(ca.ca.read_bytes(), *pair)


@contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, signed: Signed, ca: Path | None = None) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setenv("POINTSMAN_TLS_CERT", str(signed.cert))
        changed.setenv("POINTSMAN_TLS_KEY", str(signed.key))
        changed.setenv("POINTSMAN_TLS_CA", str(ca or ""))
        yield


async def test_grpc_with_a_certificate(ours: Authority, theirs: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    with environment(monkeypatch, ours.sign("router")):
        async with router() as address:
            assert await knock(address, dials(ours), "O") == "OK"
            assert await knock(address, None, "O") == "UNAVAILABLE"
            assert await knock(address, dials(theirs), "O") == "UNAVAILABLE"
            assert await knock(address, dials(ours), "") == "UNAUTHENTICATED"
            assert await knock(address, dials(ours), "X") == "UNAUTHENTICATED"
            assert await knock(address, dials(ours), "A") == "PERMISSION_DENIED"


async def test_grpc_with_certificates_of_clients(
    ours: Authority, theirs: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with environment(monkeypatch, ours.sign("router"), ours.ca):
        async with router() as address:
            assert await knock(address, dials(ours, ours.sign("operator")), "O") == "OK"
            assert await knock(address, dials(ours), "O") == "UNAVAILABLE"
            assert await knock(address, dials(ours, theirs.sign("operator")), "O") == "UNAVAILABLE"
            # The certificate allows the connection; the token decides which calls are allowed.
            assert await knock(address, dials(ours, ours.sign("agent")), "A") == "PERMISSION_DENIED"


def renew(files: Signed, ca: Path, by: Authority, name: str) -> None:
    """Overwrite a certificate, its key and the trusted CA with those of another authority, as a renewal does."""
    signed = by.sign(name)
    for old, new in ((files.key, signed.key), (files.cert, signed.cert), (ca, by.ca)):
        beside = old.with_suffix(".new")
        beside.write_bytes(new.read_bytes())
        beside.replace(old)


def copied(folder: Path, authority: Authority, name: str) -> tuple[Signed, Path]:
    """Copy a certificate's files and its authority's certificate into `folder`, where the test may overwrite them."""
    folder.mkdir()
    signed = authority.sign(name)
    for file in (signed.cert, signed.key, authority.ca):
        (folder / file.name).write_bytes(file.read_bytes())
    return Signed(folder / signed.cert.name, folder / signed.key.name), folder / authority.ca.name


async def test_a_renewed_certificate_is_taken_without_a_restart(
    ours: Authority, theirs: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_router, ca_at_router = copied(tmp_path / "router", ours, "router")
    at_agent, ca_at_agent = copied(tmp_path / "agent", ours, "agent")
    console = f"127.0.0.1:{free_port()}"
    before, after = dials(ours, ours.sign("operator")), dials(theirs, theirs.sign("operator"))

    async def look(authority: Authority) -> str:
        tls = trusting(authority, authority.sign("operator"))
        try:
            async with aiohttp.ClientSession() as client, client.get(f"https://{console}/", ssl=tls) as answer:
                return str(answer.status)
        except aiohttp.ClientError:
            return "closed"

    async with AsyncExitStack() as stack:
        with environment(monkeypatch, at_router, ca_at_router):
            address = await stack.enter_async_context(router(console_listen=console))
        stack.enter_context(environment(monkeypatch, at_agent, ca_at_agent))
        lasting: Any = ReloadingChannel(address)
        stack.push_async_callback(lasting.close)
        agent: Any = SimpleNamespace(agents=agent_pb2_grpc.AgentServiceStub(lasting), metadata=bearer("A"))
        assert await report(agent, "a") == "OK"
        assert await knock(address, before, "O") == "OK"
        assert await look(ours) == "200"
        held = await stack.enter_async_context(grpc.aio.secure_channel(address, before, options=CHANNEL_OPTIONS))
        operator = Client(held, "O")
        await operator.instances()

        # An unusable new file is ignored: the old certificate stays in use.
        key = at_router.key.read_bytes()
        at_router.key.write_text("no key")
        assert await knock(address, before, "O") == "OK"
        assert await look(ours) == "200"
        at_router.key.write_bytes(key)

        renew(at_router, ca_at_router, theirs, "router")
        assert await knock(address, before, "O") == "UNAVAILABLE"
        assert await knock(address, after, "O") == "OK"
        assert await look(ours) == "closed"
        assert await look(theirs) == "200"
        # Open connections stay open, and an agent with new files connects with them.
        await operator.instances()
        renew(at_agent, ca_at_agent, theirs, "agent")
        assert await report(agent, "b") == "OK"
        assert len(lasting._opened) == 2


async def test_a_gateways_renewed_certificate_is_taken_without_a_restart(
    ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    shown, ca = copied(tmp_path / "gateway", ours, "gateway")
    settings = GatewaySettings(
        listen="127.0.0.1:0", routers=["127.0.0.1:1"], tls_cert=shown.cert, tls_key=shown.key, tls_client_ca=ca
    )
    async with serving(settings) as (_, url):
        assert await status_of(url, trusting(ours, ours.sign("client"))) == 200
        renew(shown, ca, theirs, "gateway")
        assert await status_of(url, trusting(theirs, theirs.sign("client"))) == 200
        assert isinstance(await status_of(url, trusting(theirs, ours.sign("client"))), str)
        assert isinstance(await status_of(url, trusting(ours, ours.sign("client"))), str)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CERT": "router.pem"}, "POINTSMAN_TLS_CERT and POINTSMAN_TLS_KEY belong together"),
        ({"CA": "ca.pem"}, "a router needs a certificate of its own"),
    ],
)
def test_half_of_a_certificate_is_refused(
    variables: dict[str, str], reason: str, ours: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.sign("router")
    for name, file in variables.items():
        monkeypatch.setenv(f"POINTSMAN_TLS_{name}", str(ours.ca.parent / file))
    with pytest.raises(ValueError, match=reason):
        RouterServer(RouterSettings(), TOKENS)


async def report(client: Client, name: str, **changes: Any) -> str:
    """The status of an agent's hello: OK where the router welcomes it."""
    stream = Report(client)
    try:
        await stream.hello(name, **changes)
        return "OK" if (await stream.read()).HasField("welcome") else "?"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        stream.call.cancel()


async def test_an_agent_reports_its_own_instances_only(tmp_path: Path) -> None:
    file = tmp_path / "agents"
    file.write_text(
        "# who may report what\nfirst vllm-0.*\nsecond vllm-1.* spare:8000  # and a spare\nsixth [fd00::*]:*\n"
    )
    async with router(agents_file=file) as address, grpc.aio.insecure_channel(address) as channel:

        async def outcome(token: str, name: str, **changes: object) -> str:
            return await report(Client(channel, token), name, **changes)

        assert await outcome("first", "vllm-0.x:8000", url="http://vllm-0.x:8000") == "OK"
        assert await outcome("second", "spare:8000", url="http://spare:8000") == "OK"
        assert await outcome("sixth", "[fd00::7]:8000", url="http://[fd00::7]:8000") == "OK"
        assert await outcome("sixth", "[fd01::7]:8000", url="http://[fd01::7]:8000") == "PERMISSION_DENIED"
        assert await outcome("A", "vllm-1.x:8000", url="http://vllm-1.x:8000") == "OK"  # the token that the role shares
        assert await outcome("first", "vllm-1.x:8000", url="http://vllm-1.x:8000") == "PERMISSION_DENIED"
        # The router sends prompts and KV fetches to the addresses that the agent reports.
        assert await outcome("first", "vllm-0.x:8000", url="http://elsewhere:8000") == "PERMISSION_DENIED"
        assert await outcome("first", "vllm-0.x:8000", url="http://vllm-0.x@elsewhere:8000") == "PERMISSION_DENIED"
        for where, expected in (("vllm-0.x:8998", "OK"), ("elsewhere:8998", "PERMISSION_DENIED")):
            given = {"protocol": 1, "bootstrap_url": f"http://{where}"}
            assert await outcome("first", "vllm-0.x:8000", url="http://vllm-0.x:8000", kv_transfer=given) == expected
        assert await outcome("", "vllm-0.x:8000") == "UNAUTHENTICATED"
        assert await outcome("third", "vllm-0.x:8000") == "UNAUTHENTICATED"
        assert await outcome("G", "vllm-0.x:8000") == "PERMISSION_DENIED"
        # A bound token has an agent's permissions only.
        assert await knock(address, None, "first") == "PERMISSION_DENIED"


async def test_a_refused_stream_says_why_however_late_its_first_message_comes() -> None:
    async with router() as address, grpc.aio.insecure_channel(address) as channel:
        report = Report(Client(channel, "X"))
        answered = asyncio.create_task(report.call.code())
        # A write to a call that has ended would make the client report INTERNAL.
        assert not (await asyncio.wait([answered], timeout=0.3))[0]
        await report.hello("any:8000")
        assert await answered is grpc.StatusCode.UNAUTHENTICATED


async def test_an_agents_token_may_be_bound_to_its_certificate(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "agents"
    file.write_text("mine vllm-0.* cert=node-1.* cert=spare\nany vllm-1.*\n")
    with environment(monkeypatch, ours.sign("router"), ours.ca):
        async with router(agents_file=file) as address:

            async def outcome(token: str, instance: str, *names: str) -> str:
                signed = ours.sign(f"agent-of-{'-'.join(names)}", names)
                async with grpc.aio.secure_channel(address, dials(ours, signed), options=CHANNEL_OPTIONS) as channel:
                    await channel.channel_ready()  # on a busy machine a handshake may time out and is retried
                    return await report(Client(channel, token), instance, url=f"http://{instance}")

            assert await outcome("mine", "vllm-0.x:8000", "node-1.cluster") == "OK"
            assert await outcome("mine", "vllm-0.x:8000", "other", "spare") == "OK"
            assert await outcome("mine", "vllm-0.x:8000", "node-2.cluster") == "PERMISSION_DENIED"
            assert await outcome("mine", "vllm-1.x:8000", "node-1.cluster") == "PERMISSION_DENIED"
            assert await outcome("any", "vllm-1.x:8000", "node-2.cluster") == "OK"
    # Without client certificates, agents have no name.
    async with router(agents_file=file) as address, grpc.aio.insecure_channel(address) as channel:
        assert await report(Client(channel, "mine"), "vllm-0.x:8000", url="http://vllm-0.x:8000") == "PERMISSION_DENIED"


async def opened(session: Session) -> str:
    """The status of a gateway's hello: OK where the router welcomes it."""
    try:
        await session.hello()
        return "OK"
    except (grpc.aio.AioRpcError, AssertionError):
        return str((await session.call.code()).name)


async def test_a_gateways_id_is_its_own_and_so_are_its_streams() -> None:
    async with (
        router(gateway_lease_s=60.0, startup_wait_s=0.0) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        gateway, operator = Client(channel, "G"), Client(channel, "O")
        await Report(Client(channel, "A"), operator).join("a")
        first = Session(gateway, "g")
        assert await opened(first) == "OK"
        await first.place("r", 100)

        async def thief(secret: bytes) -> str:
            session = Session(gateway, "g")
            session.secret = secret
            return await opened(session)

        async def load() -> int:
            return (await operator.instances())["a"].num_requests

        assert await thief(b"somebody else's") == "INVALID_ARGUMENT"  # 15 bytes
        assert await thief(b"somebody else's!") == "ALREADY_EXISTS"
        assert await load() == 1
        await first.place("s", 100)  # its stream is still open
        # The gateway id also stays taken while reservations outlive the stream.
        first.call.cancel()

        async def gone() -> bool:
            answer = await operator.fleet.ListReplicas(fleet_pb2.ListReplicasRequest(), metadata=operator.metadata)
            return answer.this_replica.gateways == 0

        await eventually(gone, "the stream is gone")
        assert await thief(b"somebody else's!") == "ALREADY_EXISTS"
        assert await load() == 2
        assert await opened(Session(gateway, "g")) == "OK"


async def test_a_second_stream_of_the_same_gateway_takes_over() -> None:
    async with router() as address, grpc.aio.insecure_channel(address) as channel:
        first, second = Session(Client(channel, "G")), Session(Client(channel, "G"))
        assert await opened(first) == "OK"
        assert await opened(second) == "OK"
        with pytest.raises(AssertionError, match="the stream ended"):
            await first.read("nothing more")
        await second.send(place=placement_pb2.PlacementRequest(request_id="r", model="nobody's"))
        assert (await second.read("refusal")).refusal.request_id == "r"


async def test_a_gateways_token_may_be_bound_to_its_id(tmp_path: Path) -> None:
    file = tmp_path / "gateways"
    file.write_text("first gw-a-*\nsecond gw-b-* cert=node-1\n")
    async with router(gateways_file=file) as address, grpc.aio.insecure_channel(address) as channel:

        async def outcome(token: str, name: str) -> str:
            return await opened(Session(Client(channel, token), name))

        assert await outcome("first", "gw-a-1") == "OK"
        assert await outcome("first", "gw-b-1") == "PERMISSION_DENIED"
        assert await outcome("second", "gw-b-1") == "PERMISSION_DENIED"  # without a certificate
        assert await outcome("G", "gw-b-2") == "OK"  # the token that the role shares
        assert await outcome("third", "gw-a-2") == "UNAUTHENTICATED"
        # A bound token has a gateway's permissions only.
        assert await knock(address, None, "first") == "OK"
        assert await report(Client(channel, "first"), "gw-a-1") == "PERMISSION_DENIED"


async def test_a_gateway_shows_its_new_token_when_its_old_one_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proven_streams, "CHECK_S", 0.05)
    here, there = tmp_path / "router", tmp_path / "gateway"
    for folder in (here, there):
        folder.mkdir()
        (folder / "gateway").write_text("old\n")

    def write(folder: Path, text: str) -> None:
        (folder / "new").write_text(text)
        (folder / "new").replace(folder / "gateway")

    tokens = Tokens(token_dir=here, operator_token="O")
    shown = showing(Tokens(token_dir=there), "gateway")
    server = RouterServer(RouterSettings(listen="127.0.0.1:0", metrics_listen=""), tokens)
    await server.start()
    client = RouterClient([f"127.0.0.1:{server.port}"], "gw", shown, 1.0, lambda fleet: None, lambda connected: None)
    try:
        await client.start()

        async def connected() -> bool:
            return client.connected and len(server.router.gateways) == 1

        await eventually(connected, "connected")
        (before,) = server.router.gateways.values()
        write(here, "old\nnew\n")
        write(there, "new\n")
        write(here, "new\n")

        async def again() -> bool:
            return await connected() and before not in server.router.gateways.values()

        await eventually(again, "connected again")
    finally:
        await client.close()
        await server.stop()


@pytest.mark.parametrize("line", ["secret", "secret cert=node-1", "secret vllm-0.* cert="])
def test_a_line_without_instances_is_refused_and_its_token_not_shown(line: str, tmp_path: Path) -> None:
    file = tmp_path / "agents"
    file.write_text(f"first vllm-0.*\n{line}\n")
    with pytest.raises(ValueError, match="line 2: a token and the ids") as refused:
        RouterServer(RouterSettings(agents_file=file), TOKENS)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("shut", [False, True])
async def test_reflection_can_be_shut(shut: bool) -> None:
    async with router(reflection=not shut) as address, grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if shut:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        else:
            assert "AgentService" in str(await call.read())


async def status_of(url: str, tls: ssl.SSLContext | None) -> int | str:
    """The status of /metrics, or the kind of failure."""
    try:
        async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics", ssl=tls or False) as answer:
            return answer.status
    except aiohttp.ClientError as error:
        return type(error).__name__


def trusting(ca: Authority, shown: Signed | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca.ca)
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    return context


async def test_the_console_has_the_routers_door(
    ours: Authority, theirs: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(tls: ssl.SSLContext | None) -> str:
        url = f"{'https' if tls else 'http'}://{address}/api/ListInstances"
        shown = {"Authorization": "Bearer O"}
        try:
            async with (
                aiohttp.ClientSession() as client,
                client.post(url, json={}, headers=shown, ssl=tls or False) as answer,
            ):
                return str(answer.status)
        except aiohttp.ClientError:
            return "closed"

    address = f"127.0.0.1:{free_port()}"
    with environment(monkeypatch, ours.sign("router")):
        async with router(console_listen=address):
            assert await look(trusting(ours)) == "200"
            assert await look(None) == "closed"
            assert await look(trusting(theirs)) == "closed"
    with environment(monkeypatch, ours.sign("router"), ours.ca):
        async with router(console_listen=address):
            assert await look(trusting(ours, ours.sign("operator"))) == "200"
            assert await look(trusting(ours)) == "closed"
            assert await look(trusting(ours, theirs.sign("operator"))) == "closed"


async def test_gateway_with_tls(ours: Authority, theirs: Authority) -> None:
    shown = ours.sign("gateway")
    settings = GatewaySettings(listen="127.0.0.1:0", routers=["127.0.0.1:1"], tls_cert=shown.cert, tls_key=shown.key)
    async with serving(settings) as (_, url):
        assert url.startswith("https://")
        assert await status_of(url, trusting(ours)) == 200
        assert "Certificate" in str(await status_of(url, trusting(theirs)))
        assert await status_of(url.replace("https", "http"), None) in ("ServerDisconnectedError", "ClientOSError")
        # A response that is sent before the body is read arrives complete, although TLS connections cannot be half closed.
        host, _, port = url.removeprefix("https://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting(ours))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: 99999999\r\n\r\n" + b"x" * 1_000_000)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert answer.endswith(b"}")


async def test_gateway_with_certificates_of_clients(ours: Authority, theirs: Authority) -> None:
    shown = ours.sign("gateway")
    settings = GatewaySettings(
        listen="127.0.0.1:0", routers=["127.0.0.1:1"], tls_cert=shown.cert, tls_key=shown.key, tls_client_ca=ours.ca
    )
    async with serving(settings) as (_, url):
        assert await status_of(url, trusting(ours, ours.sign("client"))) == 200
        assert isinstance(await status_of(url, trusting(ours)), str)
        assert isinstance(await status_of(url, trusting(ours, theirs.sign("client"))), str)


async def test_redis_with_users_and_tls(ours: Authority, theirs: Authority, tmp_path: Path) -> None:
    executable = shutil.which("redis-server", path="/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    assert executable, "Debian's redis-server, built with TLS, is needed"
    make_secrets(tmp_path / "secrets")
    password = (tmp_path / "secrets/redis-password").read_text()
    shown, port = ours.sign("redis"), free_port()
    flags = ["--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    flags += ["--tls-cert-file", str(shown.cert), "--tls-key-file", str(shown.key), "--tls-ca-cert-file", str(ours.ca)]
    flags += ["--tls-auth-clients", "no", "--aclfile", str(tmp_path / "secrets/redis-users.acl")]
    server = Process("redis", [executable, *flags], tmp_path / "redis.log")
    server.start()

    def url(scheme: str, user: str, ca: Authority) -> str:
        return f"{scheme}://{user}127.0.0.1:{port}/0" + (f"?ssl_ca_certs={ca.ca}" if scheme == "rediss" else "")

    def outcome(address: str) -> str:
        try:
            with redis.Redis.from_url(address, socket_timeout=15) as client:
                client.set("pointsman:{x}:y", "1")
                return "OK"
        except redis.RedisError as error:
            return type(error).__name__

    try:
        server.wait_ready(lambda: outcome(url("rediss", f"pointsman:{password}@", ours)) == "OK", within_s=20)
        assert outcome(url("rediss", "", ours)) == "NoPermissionError"
        assert outcome(url("rediss", "pointsman:wrong@", ours)) == "AuthenticationError"
        assert outcome(url("rediss", f"pointsman:{password}@", theirs)) == "ConnectionError"
        assert outcome(url("redis", f"pointsman:{password}@", ours)) in ("ConnectionError", "TimeoutError")

        # A router keeps its state in this Redis; a router that cannot connect reports itself degraded.
        for address, degraded in (
            (url("rediss", f"pointsman:{password}@", ours), False),
            (url("rediss", f"pointsman:{password}@", theirs), True),
        ):
            settings = RouterSettings(listen="127.0.0.1:0", metrics_listen="", redis_url=address)
            one = RouterServer(settings, TOKENS)
            await one.start()
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
                    assert await report(Client(channel, "A"), "a") == "OK"

                async def settled(one: RouterServer = one, degraded: bool = degraded) -> bool:
                    owned = one.router.store.owner("m") is not None
                    return one.router.state.degraded is degraded and owned is not degraded

                await eventually(settled, "the store is used, or missed")
            finally:
                await one.stop()
    finally:
        server.kill()


def test_programs_say_what_is_wrong_with_their_certificates(tmp_path: Path, ours: Authority) -> None:
    missing = {"POINTSMAN_TLS_CA": str(tmp_path / "nowhere.pem")}
    for words in (["gateway", "--listen", "127.0.0.1:0"], ["agent", "--engines", "http://e", "--routers", "r:1"]):
        done = subprocess.run(
            pointsman_command(*words), env={**os.environ, **missing}, capture_output=True, text=True,
            check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 1
        assert "nowhere.pem" in done.stderr
        assert "Traceback" not in done.stderr
