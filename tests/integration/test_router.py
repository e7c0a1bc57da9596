"""The router over real gRPC: reports, sessions, unary placement, queries, access control."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2, struct_pb2
from google.rpc import error_details_pb2

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_common.core.block_keys import prompt_keys
from pointsman_common.io.settings import Tokens
from tests.support.processes.pointsman import pointsman_command
from tests.support.router import Client, Report, Session, details_of, running
from tests.support.waiting import eventually

PROMPT = list(range(160))
KEYS = prompt_keys(PROMPT, "m")


async def test_a_report_makes_an_instance_ready_and_a_gap_costs_a_snapshot() -> None:
    async with running() as (_, client):
        report = Report(client)
        await report.join("a", KEYS)

        async def ready() -> bool:
            instance = (await client.instances()).get("a")
            return (
                instance is not None and instance.state == fleet_pb2.INSTANCE_STATE_READY and instance.load.running == 1
            )

        await eventually(ready, "ready")
        assert (await client.instances())["a"].keys == 10
        await report.send(delta=agent_pb2.Delta(seq=7, tier=agent_pb2.TIER_DEVICE, added=[1]))
        assert "gap" in (await report.read()).resync.reason
        assert (await client.instances())["a"].state == fleet_pb2.INSTANCE_STATE_SYNCING
        await report.snapshot(KEYS[:4])
        await eventually(ready, "ready again")
        assert (await client.instances())["a"].keys == 4
        await report.send(goodbye=agent_pb2.Goodbye(reason="stopped"))
        await eventually(lambda: _empty(client), "gone")


async def test_the_series_of_an_instance_that_left_end() -> None:
    async with running() as (server, client):

        def placements() -> float | None:
            return server.router.telemetry.registry.get_sample_value(
                "pointsman_router_placements_total", {"instance": "a"}
            )

        report = Report(client)
        await report.join("a")
        session = Session(client)
        await session.hello()
        await session.place("r")
        assert placements() == 1
        await report.send(goodbye=agent_pb2.Goodbye(reason="stopped"))
        await eventually(lambda: placements() is None, "no series of it")


async def _empty(client: Client) -> bool:
    return not await client.instances()


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"block_size": 24}, grpc.StatusCode.FAILED_PRECONDITION, "block size 24 is no multiple of 16"),
        ({"scheme": "sha256"}, grpc.StatusCode.FAILED_PRECONDITION, "key scheme 'sha256'"),
    ],
)
async def test_unusable_instances_are_refused_with_the_reason(
    changes: dict[str, Any], code: grpc.StatusCode, said: str
) -> None:
    async with running() as (_, client):
        report = Report(client)
        await report.hello(**changes)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await report.read()
        assert error.value.code() is code
        assert said in (error.value.details() or "")
        assert await client.instances() == {}


async def test_a_stream_that_does_not_begin_with_hello_is_refused() -> None:
    async with running() as (_, client):
        report = Report(client)
        await report.send(load=agent_pb2.Load())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await report.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_gateways_session_from_place_to_finish_and_the_questions_about_it() -> None:
    async with running() as (_, client):
        reports = [Report(client), Report(client)]
        await reports[0].join("a")
        await reports[1].join("b", KEYS[:6])
        session = Session(client)
        welcome = await session.hello()
        assert welcome.epoch == 1
        placement = await session.place("r", 160, keys=KEYS, session_id="s")
        assert (placement.step.instance.instance_id, placement.step.instance.url) == ("b", "http://b")
        assert (placement.cached_tokens, placement.last) == (96, True)
        status = (await client.instances())["b"]
        assert (status.num_requests, status.pending_prefill_tokens, status.sessions) == (1, 64, 1)

        await session.send(first_token=placement_pb2.FirstToken(request_id="r"))
        await session.finish("r", cached_tokens=96, timings=placement_pb2.Timings(first_token_ms=5))

        async def closed() -> fleet_pb2.Decision | None:
            answer = await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="r"))
            return answer.decision if answer.decision.outcome == fleet_pb2.DECISION_OUTCOME_OK else None

        decision = await eventually(closed, "closed")
        assert decision.decision_id == placement.decision_id
        assert decision.finished.cached_tokens == 96
        assert {candidate.instance_id: candidate.score for candidate in decision.candidates} == {"a": 160.0, "b": 64.0}
        assert (decision.runner_up, decision.margin, decision.route_class) == ("a", 96.0, fleet_pb2.ROUTE_CLASS_LIGHT)
        assert (await client.instances())["b"].num_requests == 0

        listed = await client.fleet.ListDecisions(
            fleet_pb2.ListDecisionsRequest(filter=fleet_pb2.DecisionFilter(session_id="s", instance_id="b"))
        )
        assert [decision.decision_id for decision in listed.decisions] == [decision.decision_id]
        assert not listed.decisions[0].candidates
        nothing = fleet_pb2.ListDecisionsRequest(filter=fleet_pb2.DecisionFilter(reason="session_affinity"))
        assert not (await client.fleet.ListDecisions(nothing)).decisions

        would = await client.fleet.Explain(
            fleet_pb2.ExplainRequest(
                request=placement_pb2.PlacementRequest(
                    request_id="x", model="m", input_tokens=160, keys=KEYS, session_id="s"
                )
            )
        )
        assert (would.decision.outcome, would.decision.reason) == (
            fleet_pb2.DECISION_OUTCOME_DRY_RUN,
            "session_affinity",
        )
        assert (await client.instances())["b"].num_requests == 0

        what_if = await client.fleet.WhatIf(
            fleet_pb2.WhatIfRequest(decision_id=decision.decision_id, policy=fleet_pb2.Policy(name="round_robin"))
        )
        assert (what_if.decided, what_if.changed) == (1, 1)
        assert what_if.changes[0].cached_tokens_change == what_if.cached_tokens_change == -96
        assert what_if.held == 0
        ages = fleet_pb2.DecisionFilter()
        ages.until.FromSeconds(60)
        assert not (await client.fleet.ListDecisions(fleet_pb2.ListDecisionsRequest(filter=ages))).decisions
        ages.since.FromSeconds(120)
        ages.until.FromSeconds(0)
        assert (await client.fleet.ListDecisions(fleet_pb2.ListDecisionsRequest(filter=ages))).decisions
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id="nothing"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watching_decisions_sees_them_made_and_ended() -> None:
    async with running() as (_, client):
        await Report(client).join("a")
        watch: Any = client.fleet.WatchDecisions(fleet_pb2.WatchDecisionsRequest())
        session = Session(client)
        await session.hello()
        await asyncio.sleep(0)
        reader = asyncio.ensure_future(watch.read())

        async def watched() -> bool:
            return bool(server_watchers())

        def server_watchers() -> int:
            return len(server.router.decisions._watchers)

        server = _
        await eventually(watched, "the watch has begun")
        await session.place("r")
        await session.finish("r")
        assert (await reader).decision.outcome == fleet_pb2.DECISION_OUTCOME_OPEN
        assert (await watch.read()).decision.outcome == fleet_pb2.DECISION_OUTCOME_OK
        watch.cancel()


async def test_a_gateway_that_dies_gives_its_load_back_after_the_lease() -> None:
    async with running(gateway_lease_s=0.3) as (_, client):
        await Report(client).join("a")
        session = Session(client)
        await session.hello()
        await session.place("r")
        session.call.cancel()

        async def free() -> bool:
            return (await client.instances())["a"].num_requests == 0

        await eventually(free, "released")


async def test_a_gateway_that_returns_keeps_its_open_streams() -> None:
    async with running() as (_, client):
        await Report(client).join("a")
        first = Session(client)
        await first.hello()
        for name in ("kept", "lost"):
            await first.place(name)
        second = Session(client)
        await second.hello(
            placement_pb2.OpenStream(
                request=placement_pb2.PlacementRequest(request_id="kept", model="m", input_tokens=100),
                instance_id="a",
                phase=placement_pb2.PHASE_DECODE,
            )
        )
        status = (await client.instances())["a"]
        assert (status.num_requests, status.ongoing_decode_tokens) == (1, 100)


async def test_the_unary_form_and_its_errors() -> None:
    async with running() as (_, client):
        wanted = placement_pb2.PlaceRequest(
            request=placement_pb2.PlacementRequest(request_id="r", model="m", input_tokens=10)
        )
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await client.placement.Place(wanted)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        report = Report(client)
        await report.join("a")
        await client.fleet.ListInstances(fleet_pb2.ListInstancesRequest())
        drained = await client.fleet.Drain(fleet_pb2.DrainRequest(instance_id="a"))
        assert drained.instance.state == fleet_pb2.INSTANCE_STATE_DRAINING
        with pytest.raises(grpc.aio.AioRpcError) as nowhere:
            await client.placement.Place(wanted)
        assert nowhere.value.code() is grpc.StatusCode.UNAVAILABLE
        details = details_of(nowhere.value)
        why, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert details[0].Unpack(why)
        assert (why.reason, why.domain) == ("NO_INSTANCE", "pointsman")
        assert details[1].Unpack(retry)
        assert retry.retry_delay.seconds == 1
        await client.fleet.Drain(fleet_pb2.DrainRequest(instance_id="a", resume=True))
        first, again = await client.placement.Place(wanted), await client.placement.Place(wanted)
        assert first == again
        assert (await client.instances())["a"].num_requests == 1
        for _ in range(2):
            await client.placement.Finish(
                placement_pb2.FinishRequest(
                    finished=placement_pb2.Finished(request_id="r", outcome=placement_pb2.OUTCOME_OK)
                )
            )
        assert (await client.instances())["a"].num_requests == 0


async def test_what_cannot_be_is_refused_by_the_unary_form_and_names_the_field() -> None:
    def placed(**changes: Any) -> placement_pb2.PlaceRequest:
        values: dict[str, Any] = {"request_id": "x", "model": "m", "input_tokens": 100} | changes
        return placement_pb2.PlaceRequest(request=placement_pb2.PlacementRequest(**values))

    def finished(**fields: Any) -> placement_pb2.FinishRequest:
        return placement_pb2.FinishRequest(finished=placement_pb2.Finished(**fields))

    async with running() as (_, client):
        await Report(client).join("a")
        await Report(client).join("b", model="n")
        place, finish = client.placement.Place, client.placement.Finish
        await place(placed(request_id="open"))
        for call, field in (
            (finish(placement_pb2.FinishRequest()), "finished.request_id"),
            (finish(finished(outcome=placement_pb2.OUTCOME_OK)), "finished.request_id"),
            (finish(finished(request_id="open")), "finished.outcome"),
            (place(placed(request_id="")), "request.request_id"),
            (place(placed(keys=range(200))), "request.keys"),
            (client.fleet.Explain(fleet_pb2.ExplainRequest(request=placed(keys=range(7)).request)), "request.keys"),
            (place(placed(request_id="open", model="n")), "request.model"),
            (place(placed(request_id="open", model="")), "request.model"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            details = details_of(error.value)
            info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            assert details[0].Unpack(info)
            assert details[1].Unpack(bad)
            assert (info.reason, info.metadata["field"]) == ("INVALID_FIELD", field)
            assert [violation.field for violation in bad.field_violations] == [field]
        await finish(finished(request_id="open", outcome=placement_pb2.OUTCOME_OK))
        over = duration_pb2.Duration(seconds=-1)
        for call, code, reason in (
            (place(placed(request_id="open")), grpc.StatusCode.ABORTED, "REQUEST_ENDED"),
            (
                place(placed(deadline=over)),
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "FIRST_TOKEN_TOO_LATE",
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is code
            assert details_of(error.value)[0].Unpack(info)
            assert info.reason == reason
        assert {name: status.num_requests for name, status in (await client.instances()).items()} == {"a": 0, "b": 0}


async def test_what_cannot_be_is_refused_on_a_session_which_goes_on() -> None:
    async with running() as (_, client):
        await Report(client).join("a")
        await Report(client).join("b", model="n")
        session = Session(client)
        await session.hello()
        await session.place("open")
        for changes, code in (
            ({"request_id": ""}, 3),
            ({"keys": range(200)}, 3),
            ({"request_id": "open", "model": "n"}, 3),
            ({"deadline": duration_pb2.Duration(seconds=-1)}, 4),
        ):
            values: dict[str, Any] = {"request_id": "x", "model": "m", "input_tokens": 100} | changes
            await session.send(place=placement_pb2.PlacementRequest(**values))
            refusal = (await session.read("placement", "refusal")).refusal
            assert (refusal.request_id, refusal.code) == (values["request_id"], code)
            assert not refusal.HasField("retry_after")
        await session.finish("open", outcome=placement_pb2.OUTCOME_UNSPECIFIED)
        await session.send(place=placement_pb2.PlacementRequest(request_id="open", model="m", input_tokens=100))
        assert (await session.read("placement", "refusal")).refusal.code == 10
        await session.place("next")
        assert (await client.instances())["a"].num_requests == 1


async def test_the_policy_can_be_changed_and_wrong_settings_name_the_field() -> None:
    async with running() as (_, client):
        settings = struct_pb2.Struct()
        settings.update({"decode_weight": 0.5})
        answer = await client.fleet.SetPolicy(
            fleet_pb2.SetPolicyRequest(policy=fleet_pb2.Policy(name="unified", settings=settings))
        )
        assert answer.policy.settings["decode_weight"] == 0.5
        settings.update({"decode_weight": -1})
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.fleet.SetPolicy(
                fleet_pb2.SetPolicyRequest(policy=fleet_pb2.Policy(name="unified", settings=settings))
            )
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        bad = error_details_pb2.BadRequest()
        assert details_of(error.value)[1].Unpack(bad)
        assert bad.field_violations[0].field == "policy.settings.decode_weight"


async def test_doors_open_to_the_right_role_only() -> None:
    tokens = Tokens(agent_token="A", gateway_token="G", operator_token="O", token_dir=None)
    async with running(tokens) as (server, operator):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            outcomes = {}
            for token in ("", "wrong", "A", "G", "O"):
                client = Client(channel, token)
                calls: dict[str, Callable[[Client], Any]] = {
                    "list": lambda c: c.fleet.ListInstances(fleet_pb2.ListInstancesRequest(), metadata=c.metadata),
                    "drain": lambda c: c.fleet.Drain(fleet_pb2.DrainRequest(instance_id="x"), metadata=c.metadata),
                    "place": lambda c: c.placement.Place(placement_pb2.PlaceRequest(), metadata=c.metadata),
                    "report": lambda c: Report(c).read(),
                }
                for name, call in calls.items():
                    # Only this call is not ended by the router; the others end by themselves, however slow the machine is.
                    open_s = 0.5 if (token, name) == ("A", "report") else 30.0
                    outcomes[token, name] = await _code(call(client), open_s)
        unauthenticated, denied = "UNAUTHENTICATED", "PERMISSION_DENIED"
        assert outcomes == {
            **{
                (token, name): unauthenticated
                for token in ("", "wrong")
                for name in ("list", "drain", "place", "report")
            },
            **{("A", name): denied for name in ("list", "drain", "place")},
            **{("G", name): denied for name in ("drain", "report")},
            ("A", "report"): "open",
            ("G", "list"): "OK",
            ("G", "place"): "INVALID_ARGUMENT",
            ("O", "list"): "OK",
            ("O", "drain"): "NOT_FOUND",
            ("O", "place"): "INVALID_ARGUMENT",
            ("O", "report"): denied,
        }
        assert await operator.instances() == {}


async def _code(call: Awaitable[object], open_s: float) -> str:
    try:
        async with asyncio.timeout(open_s):
            await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    except TimeoutError:
        return "open"
    return "OK"


def test_a_router_without_tokens_refuses_to_listen_off_the_loopback() -> None:
    command = pointsman_command("router", "--listen", "0.0.0.0:0", "--metrics-listen", "")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "refusing to listen on 0.0.0.0:0 without tokens" in ended.stderr


async def test_every_decision_is_written_to_the_file_and_can_be_made_again_from_a_shell(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    async with running(decision_log_file=file) as (server, client):
        await Report(client).join("a")
        session = Session(client)
        await session.hello()
        await session.place("r", 40)
        await session.finish("r")

        async def written() -> bool:
            return len(file.read_text().splitlines()) == 2

        await eventually(written, "two lines")
        router = ("--router", f"127.0.0.1:{server.port}")
        assert "least_requests, 0 of 1 requests (0%)" in await _pointsman(
            "what-if", "--policy", "least_requests", "--last", "5", *router
        )
        assert "unified" in await _pointsman("what-if", "r", "--policy", "unified", "--set", "decode_weight=0", *router)
        assert "least_load_x_work" in await _pointsman("decisions", "--since", "60", *router)
    assert await _pointsman("decisions", "verify", str(file)) == "1 of 1 decisions are the same when made again\n"
    decided, closed = map(json.loads, file.read_text().splitlines())
    assert decided["decision"]["request"]["input_tokens"] == 40
    assert closed["decision_id"] == decided["decision"]["decision_id"]
    assert closed["finished"]["outcome"] == "OK"


async def test_a_decision_shows_the_agent_and_who_started_it(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    async with running(decision_log_file=file) as (server, client):
        await Report(client).join("a")
        session = Session(client)
        await session.hello()
        await session.place("r", 40, session_id="run:a2", agent_id="a2", agent_parent_session_id="run:a1")
        await session.place("long", 40, agent_id="x" * 500, agent_parent_session_id="y" * 500)
        await session.place("plain", 40)
        decisions = [
            (await client.fleet.GetDecision(fleet_pb2.GetDecisionRequest(decision_id=name))).decision
            for name in ("r", "long", "plain")
        ]
        assert [(decision.agent_id, decision.agent_parent_session_id) for decision in decisions] == [
            ("a2", "run:a1"),
            ("x" * 128, "y" * 128),
            ("", ""),
        ]
        router = ("--router", f"127.0.0.1:{server.port}")
        assert "agent a2  started by session run:a1\n" in await _pointsman("explain", "r", *router)
        assert "started by" not in await _pointsman("explain", "plain", *router)

        async def written() -> bool:
            return len(file.read_text().splitlines()) == 3

        await eventually(written, "three lines")
    request = json.loads(file.read_text().splitlines()[0])["decision"]["request"]
    assert (request["agent_id"], request["agent_parent"]) == ("a2", "run:a1")


async def test_a_shell_can_ask_through_reflection() -> None:
    async with running() as (server, client):
        await Report(client).join("a")
        base = ["--protocol", "grpc", "--http2-prior-knowledge"]
        listed = await _buf_curl(*base, "--list-services", f"http://127.0.0.1:{server.port}")
        assert "pointsman.router.v1.FleetService" in listed.split()
        url = f"http://127.0.0.1:{server.port}/pointsman.router.v1.FleetService/ListInstances"
        answer = json.loads(await _buf_curl(*base, "-d", "{}", url))
        assert answer["instances"][0]["instance"]["instanceId"] == "a"


async def _pointsman(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *pointsman_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def _buf_curl(*arguments: str) -> str:
    buf = Path(sys.executable).parent / "buf"
    process = await asyncio.create_subprocess_exec(
        buf, "curl", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_messages_that_are_ready_together_travel_as_one() -> None:
    async with running() as (server, client):
        report = Report(client)
        await report.join("a")
        session = Session(client)
        await session.hello()
        asked = [placement_pb2.PlacementRequest(request_id=f"r{n}", model="m", input_tokens=10) for n in range(5)]
        ended = placement_pb2.Finished(request_id="r4", outcome=placement_pb2.OUTCOME_OK)
        requests = [
            *(placement_pb2.SessionRequest(place=request) for request in asked),
            placement_pb2.SessionRequest(first_token=placement_pb2.FirstToken(request_id="r0")),
            placement_pb2.SessionRequest(finished=ended),
        ]
        await session.send(batch=placement_pb2.SessionRequestBatch(requests=requests))
        answers = [(await session.read("placement")).placement.request_id for _ in asked]
        assert answers == [request.request_id for request in asked]
        counters = server.router.state.reservations.counters("a")
        assert (counters.num_requests, counters.ongoing_decode_tokens) == (4, 10)
