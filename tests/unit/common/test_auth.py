"""Who may call what: the matrix, the tokens, and a real server that refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.agent.v1 import agent_pb2, agent_pb2_grpc
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2, placement_pb2_grpc
from pointsman_common.io.auth import ROLES, TokenInterceptor, bearer, is_loopback, may_call, role_of, showing
from pointsman_common.io.channel import SERVER_OPTIONS, open_channel
from pointsman_common.io.settings import Tokens

TOKENS = {"agent": "a-token", "gateway": "g-token", "operator": "o-token", "observer": "s-token"}
ACCEPTED = {role: (token, f"old-{token}") for role, token in TOKENS.items()}
EVERYBODY = {None, *ROLES}
LOOKING: set[str | None] = {"gateway", "operator", "observer"}
FLEET = "/pointsman.router.v1.FleetService/"

# Who may call each method. A method that is added to a proto must be added here.
ALLOWED: dict[str, set[str | None]] = {
    "/pointsman.agent.v1.AgentService/Report": {"agent"},
    "/pointsman.agent.v1.AgentService/ReportAbsentEngines": {"agent"},
    "/pointsman.router.v1.PlacementService/Session": {"gateway", "operator"},
    "/pointsman.router.v1.PlacementService/Place": {"gateway", "operator"},
    "/pointsman.router.v1.PlacementService/Finish": {"gateway", "operator"},
    FLEET + "ListInstances": LOOKING,
    FLEET + "GetInstance": LOOKING,
    FLEET + "Drain": {"operator"},
    FLEET + "SetInstanceOrder": {"operator"},
    FLEET + "ListInstanceOrders": LOOKING,
    FLEET + "SetPolicy": {"operator"},
    FLEET + "ListDecisions": LOOKING,
    FLEET + "WatchDecisions": LOOKING,
    FLEET + "GetDecision": LOOKING,
    FLEET + "Explain": LOOKING,
    FLEET + "WhatIf": LOOKING,
    FLEET + "SummarizeDecisions": LOOKING,
    FLEET + "ListSessions": LOOKING,
    FLEET + "ListPolicies": LOOKING,
    FLEET + "ListReplicas": LOOKING,
    FLEET + "ListPoolHistories": LOOKING,
    FLEET + "ListInstanceHistories": LOOKING,
    "/grpc.health.v1.Health/Check": set(EVERYBODY),
    "/grpc.health.v1.Health/Watch": set(EVERYBODY),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": set(EVERYBODY),
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": set(EVERYBODY),
    "/grpc.channelz.v1.Channelz/GetServers": set(),
    "/pointsman.router.v1.AdminService/Anything": set(),
    "": set(),
}


def test_the_matrix_knows_every_method() -> None:
    services = [
        service
        for file in (agent_pb2, placement_pb2, fleet_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods == {name for name in ALLOWED if name.startswith("/pointsman.")} - {
        "/pointsman.router.v1.AdminService/Anything"
    }


@pytest.mark.parametrize("method", ALLOWED)
def test_may_call(method: str) -> None:
    assert {role for role in EVERYBODY if may_call(method, role)} == ALLOWED[method]


def test_no_role_has_no_name() -> None:
    assert not may_call("/pointsman.agent.v1.AgentService/Report", "")


@pytest.mark.parametrize(
    ("header", "role"),
    [
        ("Bearer a-token", "agent"),
        ("bearer o-token", "operator"),
        ("Bearer g-token", "gateway"),
        ("Bearer s-token", "observer"),
        ("Bearer old-a-token", "agent"),
        ("Bearer a-token\nold-a-token", None),
        ("Bearer x-token", None),
        ("Bearer a-toke", None),
        ("Bearer a-token2", None),
        ("Bearer ", None),
        ("Bearer", None),
        ("Basic a-token", None),
        ("a-token", None),
        ("Bearer  a-token", None),
        ("", None),
    ],
)
def test_role_of(header: str, role: str | None) -> None:
    assert role_of(ACCEPTED, header) == role


@given(st.text(max_size=20))
def test_an_empty_token_is_nobodys(presented: str) -> None:
    assert role_of(dict.fromkeys(ROLES, ("",)), f"Bearer {presented}") is None


@pytest.mark.parametrize("role", ROLES)
def test_bearer_is_what_role_of_reads(role: str) -> None:
    ((name, value),) = bearer(TOKENS[role])
    assert name == "authorization"
    assert role_of(ACCEPTED, value) == role
    assert bearer("") == ()


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.9.1:0", True),
        ("[::1]:50051", True),
        ("localhost:50051", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        ("10.0.0.7:50051", False),
        (":50051", False),
        ("router:50051", False),
    ],
)
def test_is_loopback(listen: str, loopback: bool) -> None:
    assert is_loopback(listen) is loopback


class Agents(agent_pb2_grpc.AgentServiceServicer):
    async def Report(self, request_iterator: Any, context: Any) -> AsyncIterator[agent_pb2.ReportResponse]:
        async for _ in request_iterator:
            yield agent_pb2.ReportResponse(welcome=agent_pb2.Welcome(router_id="test"))


class Placements(placement_pb2_grpc.PlacementServiceServicer):
    async def Place(self, request: Any, context: Any) -> placement_pb2.PlaceResponse:
        return placement_pb2.PlaceResponse()


class Fleet(fleet_pb2_grpc.FleetServiceServicer):
    async def Drain(self, request: Any, context: Any) -> fleet_pb2.DrainResponse:
        return fleet_pb2.DrainResponse()

    async def WatchDecisions(self, request: Any, context: Any) -> AsyncIterator[fleet_pb2.WatchDecisionsResponse]:
        yield fleet_pb2.WatchDecisionsResponse()


@dataclass
class Door:
    """A channel to a server, with one call of each kind."""

    channel: grpc.aio.Channel

    async def knock(self, what: str, token: str) -> grpc.StatusCode:
        """The status with which the call of `what` ends."""
        with_: dict[str, Any] = {"metadata": bearer(token), "timeout": 10}
        fleet = fleet_pb2_grpc.FleetServiceStub(self.channel)
        try:
            match what:
                case "report":
                    call = agent_pb2_grpc.AgentServiceStub(self.channel).Report(None, **with_)
                    await call.write(agent_pb2.ReportRequest())
                    await call.done_writing()
                    answers = [answer async for answer in call]
                    assert len(answers) == 1
                case "place":
                    stub = placement_pb2_grpc.PlacementServiceStub(self.channel)
                    await stub.Place(placement_pb2.PlaceRequest(), **with_)
                case "drain":
                    await fleet.Drain(fleet_pb2.DrainRequest(), **with_)
                case "watch":
                    request = fleet_pb2.WatchDecisionsRequest()
                    received = [message async for message in fleet.WatchDecisions(request, **with_)]
                    assert len(received) == 1
        except grpc.aio.AioRpcError as error:
            return error.code()
        except grpc.aio.UsageError:
            return await call.code()
        return grpc.StatusCode.OK


async def serve(tokens: Tokens) -> tuple[grpc.aio.Server, Door]:
    server = grpc.aio.server(interceptors=[TokenInterceptor(tokens)], options=SERVER_OPTIONS)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(Agents(), server)  # type: ignore[abstract]
    placement_pb2_grpc.add_PlacementServiceServicer_to_server(Placements(), server)  # type: ignore[abstract]
    fleet_pb2_grpc.add_FleetServiceServicer_to_server(Fleet(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, Door(open_channel(f"127.0.0.1:{port}"))


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    for role, token in TOKENS.items():
        (tmp_path / role).write_text(f"{token}\n")
    server, door = await serve(Tokens(token_dir=tmp_path))
    yield door
    await door.channel.close(None)
    await server.stop(None)


OK, DENIED, UNKNOWN = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("what", ["report", "place", "drain", "watch"])
async def test_nobody_and_strangers_are_unauthenticated(door: Door, what: str) -> None:
    assert await door.knock(what, "") is UNKNOWN
    assert await door.knock(what, "x-token") is UNKNOWN


@pytest.mark.parametrize(
    ("what", "statuses"),
    [
        ("report", {"agent": OK, "gateway": DENIED, "operator": DENIED, "observer": DENIED}),
        ("place", {"agent": DENIED, "gateway": OK, "operator": OK, "observer": DENIED}),
        ("drain", {"agent": DENIED, "gateway": DENIED, "operator": OK, "observer": DENIED}),
        ("watch", {"agent": DENIED, "gateway": OK, "operator": OK, "observer": OK}),
    ],
)
async def test_each_role_has_its_own_doors(door: Door, what: str, statuses: dict[str, grpc.StatusCode]) -> None:
    assert {role: await door.knock(what, token) for role, token in TOKENS.items()} == statuses


async def test_refusal_names_the_role_and_the_method_and_no_token(door: Door) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fleet_pb2_grpc.FleetServiceStub(door.channel).Drain(
            fleet_pb2.DrainRequest(), metadata=bearer(TOKENS["gateway"])
        )
    assert refused.value.details() == "role gateway may not call /pointsman.router.v1.FleetService/Drain"


async def test_without_tokens_every_door_is_open() -> None:
    tokens = Tokens()
    assert TokenInterceptor(tokens).open
    server, door = await serve(tokens)
    try:
        assert [await door.knock(what, "") for what in ("report", "place", "drain", "watch")] == [OK] * 4
    finally:
        await door.channel.close(None)
        await server.stop(None)


async def test_one_token_closes_all_doors() -> None:
    server, door = await serve(Tokens(agent_token="a-token"))
    try:
        assert await door.knock("report", "a-token") is OK
        assert await door.knock("drain", "") is UNKNOWN
    finally:
        await door.channel.close(None)
        await server.stop(None)


def write(file: Path, text: str) -> None:
    """Replace `file` by a rename, as a mounted secret is updated."""
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(file)


async def test_a_token_is_rotated_while_processes_run(door: Door, tmp_path: Path) -> None:
    shown = showing(Tokens(token_dir=tmp_path), "operator")

    async def statuses() -> list[grpc.StatusCode]:
        return [await door.knock("drain", token) for token in ("o-token", "new")]

    assert (await statuses(), shown()) == ([OK, UNKNOWN], bearer("o-token"))
    write(tmp_path / "operator", "o-token\nnew\n")
    assert (await statuses(), shown()) == ([OK, OK], bearer("o-token"))
    write(tmp_path / "operator", "new\no-token\n")
    assert (await statuses(), shown()) == ([OK, OK], bearer("new"))
    write(tmp_path / "operator", "new\n")
    assert (await statuses(), shown()) == ([UNKNOWN, OK], bearer("new"))


@pytest.mark.parametrize("broken", ["", "\n\n", "o-token\nb\nc\n"])
async def test_a_file_that_cannot_be_used_changes_nothing(
    broken: str, door: Door, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = showing(Tokens(token_dir=tmp_path), "operator")
    for role in TOKENS:
        write(tmp_path / role, broken)
    assert await door.knock("drain", "o-token") is OK
    assert await door.knock("drain", "") is UNKNOWN
    for role in TOKENS:
        (tmp_path / role).unlink()
    assert await door.knock("drain", "o-token") is OK
    assert await door.knock("drain", "") is UNKNOWN
    assert shown() == bearer("o-token")
    said = capsys.readouterr()
    assert "operator" in said.out + said.err
    assert "o-token" not in said.out + said.err


async def test_bound_tokens_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "agents"
    file.write_text("first a-*\n")
    auth = TokenInterceptor(Tokens(), {"agent": file})

    def known(token: str, name: str) -> tuple[str | None, bool]:
        return auth.role(f"Bearer {token}"), auth.may_speak_for("agent", f"Bearer {token}", (), name)

    assert known("first", "a-1") == ("agent", True)
    assert known("first", "b-1") == ("agent", False)
    write(file, "second b-*\n")
    assert known("first", "a-1")[0] is None
    assert known("second", "b-1") == ("agent", True)
    write(file, "second\n")  # good for nothing: what was read before stays
    assert known("second", "b-1") == ("agent", True)
    write(file, "# nobody\n")
    assert known("second", "b-1")[0] is None
    assert not auth.open


def test_a_folder_of_tokens_that_is_not_there_is_not_one_without_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"POINTSMAN_TOKEN_DIR {tmp_path}/absent: there is no such folder"):
        TokenInterceptor(Tokens(token_dir=tmp_path / "absent"))
    (tmp_path / "agent.txt").write_text("secret")
    with pytest.raises(ValueError, match=f"POINTSMAN_TOKEN_DIR {tmp_path}: it has none of the files agent, gateway"):
        TokenInterceptor(Tokens(token_dir=tmp_path))
    assert not TokenInterceptor(Tokens(token_dir=tmp_path, operator_token="O")).open
