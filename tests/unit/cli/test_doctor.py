"""What the doctor says of KV transfers, of instances' states, and of orders that may have been forgotten."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2
from pointsman_cli import doctor, doctor_kv, instance_commands
from pointsman_cli.doctor import (
    contradicted_finding,
    forgotten_orders,
    inexact_finding,
    instance_finding,
    load_findings,
    placeability,
    redundancy,
    refused_policies,
    versions,
)
from pointsman_cli.doctor_findings import EngineAccess, Finding
from pointsman_cli.doctor_kv import Answer, answers, difference, pairs_of, transfers
from pointsman_cli.doctor_redis import RedisUrls, redis_finding, redis_findings
from pointsman_cli.fleet_commands import _state_of
from pointsman_router.core.placement_types import InstanceInfo
from pointsman_router.io.convert import instance_and_load_messages
from pointsman_router.io.convert.times import duration, timestamp
from tests.support.pages import serving
from tests.support.processes.process import free_port


@pytest.fixture
def bootstrap() -> Iterator[str]:
    """A bootstrap server's address."""

    with serving(lambda path: (200 if path == "/query" else 404, b"")) as url:
        yield url


def instance(
    name: str, url: str, block_size: int = 16, role: agent_pb2.KvRole.ValueType = agent_pb2.KV_ROLE_UNSPECIFIED
) -> agent_pb2.Instance:
    kv = agent_pb2.KvTransfer(protocol=agent_pb2.KV_PROTOCOL_MOONCAKE, bootstrap_url=url, role=role)
    return agent_pb2.Instance(instance_id=name, block_size=block_size, kv_transfer=kv)


def levels(*pool: agent_pb2.Instance) -> list[tuple[str, str]]:
    return [(finding.check.split()[0], finding.level) for finding in transfers(list(pool))]


def test_a_pair_that_fits_is_well(bootstrap: str) -> None:
    assert levels(instance("a", bootstrap), instance("b", bootstrap), agent_pb2.Instance(instance_id="c")) == [
        ("a", Finding.OK),
        ("b", Finding.OK),
    ]
    producer, consumer = agent_pb2.KV_ROLE_PRODUCER, agent_pb2.KV_ROLE_CONSUMER
    # An instance that only receives KV needs no bootstrap server.
    assert levels(instance("a", bootstrap, role=producer), instance("b", "http://nowhere", role=consumer)) == [
        ("a", Finding.OK),
        ("b", Finding.OK),
    ]


def test_one_that_fits_nobody_is_reported(bootstrap: str) -> None:
    assert levels(instance("a", bootstrap), instance("b", bootstrap, block_size=32)) == [
        ("a", Finding.WARN),
        ("b", Finding.WARN),
    ]


def test_a_thousand_engines_are_compared_by_what_they_differ_in(monkeypatch: pytest.MonkeyPatch) -> None:
    read, once = Counter[str](), instance_and_load_messages.instance_info

    def instance_info(wire: agent_pb2.Instance) -> InstanceInfo:
        read[wire.instance_id] += 1
        return once(wire)

    monkeypatch.setattr(instance_and_load_messages, "instance_info", instance_info)
    kv = agent_pb2.KvTransfer(protocol=agent_pb2.KV_PROTOCOL_NIXL)
    pool = [agent_pb2.Instance(instance_id=str(number), block_size=16, kv_transfer=kv) for number in range(200)]
    pool.append(agent_pb2.Instance(instance_id="other", block_size=32, kv_transfer=kv))
    *alike, other = transfers(pool)
    assert {finding.found for finding in alike} == {"can send KV to 199 instances"}
    assert other.level == Finding.WARN
    assert len(list(pairs_of(pool))) == 200
    assert max(read.values()) <= 4


def test_engines_are_asked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8)

    def engine(*_: object) -> Iterator[Finding]:
        together.wait(5)
        return iter(())

    monkeypatch.setattr(doctor, "_engine", engine)
    fleet = [status("READY", instance=agent_pb2.Instance(instance_id=str(number))) for number in range(8)]
    named = [finding.check for finding in doctor._fleet(fleet, EngineAccess()) if finding.check.isdigit()]
    assert list(dict.fromkeys(named)) == [str(number) for number in range(8)]


def test_a_bootstrap_server_that_does_not_answer_is_reported(bootstrap: str) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    assert levels(instance("a", gone), instance("b", bootstrap)) == [("a", Finding.FAIL), ("b", Finding.OK)]


def test_each_sender_is_compared_with_one_receiver_that_does_not_refuse_it() -> None:
    urls = {name: f"http://{name}:1" for name in "abc"}
    a, b, c = (instance(name, url) for name, url in urls.items())
    producer = instance("p", "http://p:1", role=agent_pb2.KV_ROLE_PRODUCER)
    b.kv_transfer.wrong_from.add(bootstrap_url=urls["a"], requests=1)
    pairs = [(source.instance_id, target.instance_id) for source, target in pairs_of([a, b, producer, c])]
    assert pairs == [("a", "c"), ("b", "c"), ("p", "c"), ("c", "a")]


def test_answers_differ_unless_they_part_at_a_tie() -> None:
    def answer(text: str, *top: dict[str, float]) -> Answer:
        return Answer(text, text.split(), top, None)

    alone = answer("a b", {"a": -0.1, "x": -2.5}, {"b": -0.7, "c": -0.75})
    assert difference(alone, alone) == ""
    tie = answer("a c", {"a": -0.1, "x": -2.5}, {"b": -0.76, "c": -0.7})
    assert difference(alone, tie) == ""
    assert (
        difference(alone, answer("x b", {"x": -2.2}, {})) == "token 1 is 'x' instead of 'a', less probable by 2.40 nats"
    )
    assert difference(alone, answer("y b", {"y": -0.1}, {})) == "token 1 is 'y' instead of 'a', not among the best five"
    # The model has read something else, although the tokens are the same or part at a tie.
    sure = answer("a b", {"a": -0.01, "x": -7.0}, {"b": -0.01, "c": -9.0})
    assert difference(alone, sure) == "token 2: log probability of 'b' -0.01 instead of -0.70"
    assert (
        difference(alone, answer("a c", {"a": -0.1}, {"c": -0.01}))
        == "token 2: log probability of 'c' -0.01 instead of -0.75"
    )
    # An engine that reports no log probabilities.
    assert difference(Answer("a b", (), (), None), Answer("a c", (), (), None)) == "'a c' instead of 'a b'"


def pair(protocol: agent_pb2.KvProtocol.ValueType) -> list[agent_pb2.Instance]:
    pool = [agent_pb2.Instance(instance_id=name, model="m", url=f"http://{name}:1", block_size=16) for name in "ab"]
    for instance in pool:
        instance.kv_transfer.protocol = protocol
    pool[1].kv_transfer.role = agent_pb2.KV_ROLE_CONSUMER
    return pool


def completion(cached: int | None, **more: object) -> dict[str, object]:
    usage = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [{"text": "1", "finish_reason": "length", "logprobs": None}], "usage": usage, **more}


@pytest.mark.parametrize(
    ("cached", "level", "found"),
    [
        (160, Finding.OK, "an answer from transferred KV is the one without"),
        (0, Finding.WARN, "the receiver computed a prompt itself whose KV was sent to it"),
        (None, Finding.WARN, "answers are equal, but the receiver does not report whether it used the KV"),
    ],
)
def test_equal_answers_prove_something_only_if_the_kv_was_used(
    monkeypatch: pytest.MonkeyPatch, cached: int | None, level: str, found: str
) -> None:
    def complete(target: agent_pb2.Instance, body: dict[str, Any], *_: object) -> tuple[dict[str, object], None]:
        params = body.get("kv_transfer_params") or {}
        kept = {"remote_engine_id": "e", "remote_prefill_cached_tokens": 0}
        if target.instance_id == "a":
            return completion(0, kv_transfer_params=kept), None
        # vLLM's receiver reports this number in place of its own.
        return completion(params.get("remote_prefill_cached_tokens", cached)), None

    monkeypatch.setattr(doctor_kv, "complete", complete)
    [finding] = answers(pair(agent_pb2.KV_PROTOCOL_NIXL), EngineAccess())
    assert (finding.check, finding.level, finding.found) == ("a -> b KV", level, found)


def test_an_engine_whose_answer_is_none_does_not_end_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_kv, "complete", lambda *_: ({"error": {"message": "busy"}}, None))
    [finding] = answers(pair(agent_pb2.KV_PROTOCOL_NIXL), EngineAccess())
    assert finding.level == Finding.WARN


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"usage": []}', b'{"usage": {"prompt_tokens_details": null}}'])
def test_an_engine_whose_answer_cannot_be_read_does_not_end_the_doctor(body: bytes) -> None:
    with serving(lambda _: (200, body)) as url:
        [finding, *_] = doctor._engine(agent_pb2.Instance(instance_id="a", url=url), EngineAccess())
    assert (finding.level, finding.check) == (Finding.WARN, "a engine")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"router_id": "r1"}', b'{"engines": 1}', b'{"engines": [1]}'])
def test_what_is_no_agent_is_told_as_such(body: bytes) -> None:
    with serving(lambda _: (200, body)) as url:
        [finding] = doctor._agent(url)
    assert (finding.level, finding.check) == (Finding.FAIL, f"agent {url}")
    assert finding.found in ("what answers there is no agent", "its answer is no JSON object")


def test_cordons_of_long_ago_and_orders_for_nobody_are_reported() -> None:
    day = 86_400.0

    def order(name: str, set_at: float, **ordered: object) -> fleet_pb2.InstanceOrder:
        values: dict[str, Any] = {"weight": 1.0, "instance_known": True, "cordon_time": timestamp(set_at), **ordered}
        return fleet_pb2.InstanceOrder(instance_id=name, **values)

    orders = [
        order("new", 2 * day, cordoned=True),
        order("old", day / 2, cordoned=True, cordon_reason="a new disk"),
        order("light", 0.0, weight=0.5),
        order("gone", 2 * day, weight=0.5, instance_known=False),
        order("both", 2 * day, cordoned=True, weight=0.5, weight_reason="canary", instance_known=False),
    ]
    nobody = "no agent reports an instance of this id"
    assert [
        (finding.level, finding.check, finding.found, finding.advice) for finding in forgotten_orders(orders, 2 * day)
    ] == [
        (Finding.WARN, "old", "cordoned: a new disk; for more than a day", "pointsman uncordon old"),
        (Finding.WARN, "gone", f"weight 0.5; {nobody}", "if it went for good: pointsman weight gone 1"),
        (
            Finding.WARN,
            "both",
            f"cordoned, weight 0.5: canary; {nobody}",
            "if it went for good: pointsman uncordon both; pointsman weight both 1",
        ),
    ]


def test_a_router_that_was_lost_is_reported() -> None:
    replicas = fleet_pb2.ListReplicasResponse(
        replicas=[fleet_pb2.Replica(router_id="r1"), fleet_pb2.Replica(router_id="r3")],
        this_replica=fleet_pb2.RouterStatus(router_id="r1", store="redis"),
    )
    [finding] = redundancy(replicas)
    assert (finding.level, finding.check, finding.found) == (Finding.OK, "routers", "2 alive: r1, r3")
    replicas.lost_replicas.add(router_id="r2", heartbeat_age=duration(125.0))
    [finding] = redundancy(replicas)
    assert (finding.level, finding.check) == (Finding.WARN, "routers")
    assert finding.found == "2 alive: r1, r3; r2 ended without notice 125 s ago, and none has taken its place"
    replicas.this_replica.degraded = True
    [finding] = redundancy(replicas)
    assert (finding.level, finding.found) == (Finding.FAIL, "r1 places without Redis"), "nobody is known to be alive"
    replicas.this_replica.store_answer_age.CopyFrom(duration(28.0))
    [finding] = redundancy(replicas)
    assert finding.found == "r1 places without Redis, which answered 28 s ago"
    replicas.this_replica.store = "memory"
    assert list(redundancy(replicas)) == []


def test_a_router_that_does_not_place_by_the_fleets_policy_is_reported() -> None:
    replicas = fleet_pb2.ListReplicasResponse(
        replicas=[
            fleet_pb2.Replica(router_id="r1", policy=fleet_pb2.Policy(name="preble")),
            fleet_pb2.Replica(
                router_id="r2", policy=fleet_pb2.Policy(name="auto"), policy_problem="no policy 'preble'"
            ),
        ]
    )
    [finding] = refused_policies(replicas)
    assert (finding.level, finding.check) == (Finding.FAIL, "router r2")
    assert finding.found == "places with auto, not with the fleet's policy: no policy 'preble'"


def status(state: str, besides: str = "READY", **values: Any) -> fleet_pb2.InstanceStatus:
    return fleet_pb2.InstanceStatus(
        state=fleet_pb2.InstanceState.Value(f"INSTANCE_STATE_{state}"),
        underlying_state=fleet_pb2.InstanceState.Value(f"INSTANCE_STATE_{besides}"),
        **values,
    )


def test_flags_are_advised_only_to_engines_whose_events_are_missing() -> None:
    none = agent_pb2.PREFIX_MODE_NONE
    missing = agent_pb2.Instance(instance_id="a", prefix_mode=none, prefix_reason="the engine publishes no KV events")
    finding = inexact_finding(missing)
    assert (finding.level, finding.check) == (Finding.FAIL, "a")
    assert "--kv-events-config" in finding.advice
    reason = "attention of kind chunked_local has no chained prefix"
    finding = inexact_finding(
        agent_pb2.Instance(instance_id="b", prefix_mode=none, prefix_reason=reason, events_unusable=True)
    )
    assert (finding.level, finding.found) == (Finding.WARN, f"prefixes are approximate: {reason}")
    assert "--" not in finding.advice


def test_events_that_contradict_answers_are_named_with_the_reason() -> None:
    finding = contradicted_finding(status("READY", prefix_reason="4 of the last 8 answers; its agent: no answer"))
    assert finding.level == Finding.WARN
    assert "its agent: no answer" in finding.found


def test_a_model_of_which_no_instance_is_placeable_fails() -> None:
    pool = [status("CORDONED"), status("CORDONED", "UNHEALTHY"), status("CORDONED")]
    [finding] = placeability("m", pool)
    assert (finding.level, finding.check) == (Finding.FAIL, "model m")
    assert finding.found == "none placeable: 2 CORDONED, 1 CORDONED, UNHEALTHY"
    assert "pointsman uncordon" in finding.advice
    [finding] = placeability("m", [*pool, status("READY")])
    assert (finding.level, finding.found) == (Finding.OK, "1 of 4 instances placeable")


def test_a_model_of_which_no_instance_is_healthy_fails_and_gets_requests() -> None:
    out = status("READY", circuit_open=True)
    [finding] = placeability("m", [out, status("UNHEALTHY", "UNHEALTHY")])
    assert (finding.level, finding.check) == (Finding.FAIL, "model m")
    assert finding.found == "none healthy: 1 READY, out, 1 UNHEALTHY; requests are placed on them all the same"
    out.life.out_cause = "unreached"
    [finding] = placeability("m", [out])
    assert finding.found == "none healthy: 1 READY, out; each is tried by one request at a time, the others get 503"
    [finding] = placeability("m", [out, status("READY")])
    assert (finding.level, finding.found) == (Finding.OK, "1 of 2 instances placeable")


def test_instances_that_only_produce_kv_are_placeable_where_there_are_no_others() -> None:
    kv = agent_pb2.KvTransfer(protocol=agent_pb2.KV_PROTOCOL_NIXL, role=agent_pb2.KV_ROLE_PRODUCER)
    producers = [status("READY", instance=agent_pb2.Instance(kv_transfer=kv)) for _ in range(2)]
    [finding] = placeability("m", producers)
    assert (finding.level, finding.found) == (Finding.OK, "2 of 2 instances placeable")
    [finding] = placeability("m", [*producers, status("READY")])
    assert (finding.level, finding.found) == (Finding.OK, "1 of 1 instances placeable, beside 2 that only produce KV")
    [finding] = placeability("m", [*producers, status("CORDONED")])
    assert (finding.level, finding.found) == (
        Finding.FAIL,
        "none placeable: 1 CORDONED, beside 2 that only produce KV",
    )
    [finding] = placeability("m", [*producers, status("UNHEALTHY", "UNHEALTHY")])
    assert finding.found.startswith("none healthy: 1 UNHEALTHY, beside 2 that only produce KV; ")


def test_the_last_instance_that_answers_is_not_taken_out_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kv = agent_pb2.KvTransfer(protocol=agent_pb2.KV_PROTOCOL_NIXL, role=agent_pb2.KV_ROLE_PRODUCER)
    producer = status("READY", instance=agent_pb2.Instance(model="m", kv_transfer=kv))
    drained, ready = status("DRAINING", instance=agent_pb2.Instance(model="m")), status("READY")
    for pool, warned in (([producer, drained], True), ([producer, drained, ready], False), ([producer], False)):
        listed = fleet_pb2.ListInstancesResponse(instances=pool)
        monkeypatch.setattr(instance_commands, "whole", lambda *_, listed=listed: listed)
        instance_commands._warn_if_last("router:50051", drained, "pointsman drain c --resume")
        assert ("no instance of m can answer now" in capsys.readouterr().err) is warned


def test_a_drain_is_no_fault_of_the_engine() -> None:
    drained = instance_finding(status("DRAINING"))
    assert (drained.level, drained.found) == (Finding.OK, "DRAINING")
    assert drained.advice.startswith("the drain ends with its engine's restart, or: pointsman drain")
    dead = instance_finding(status("DRAINING", "UNHEALTHY", instance=agent_pb2.Instance(instance_id="a")))
    assert (dead.level, dead.found) == (Finding.WARN, "DRAINING, UNHEALTHY")
    assert "pointsman drain a --resume" in dead.advice


def test_a_cordon_does_not_hide_that_the_engine_is_away() -> None:
    dead = status("CORDONED", "UNHEALTHY", cordoned=True, cordon_reason="a new disk", weight=0.5)
    found = instance_finding(dead)
    assert (found.level, found.found) == (Finding.WARN, "CORDONED, UNHEALTHY (cordoned: a new disk, weight 0.5)")
    well = status("CORDONED", cordoned=True, weight=1.0)
    assert (instance_finding(well).level, instance_finding(well).found) == (Finding.OK, "CORDONED (cordoned)")


def test_a_suspended_engine_is_reported_with_its_reason_and_is_not_asked() -> None:
    load = agent_pb2.Load(healthy=True, suspended="asleep (level 1)")
    asleep = status("SUSPENDED", "SUSPENDED", load=load)
    found = instance_finding(asleep)
    assert (found.level, found.found) == (Finding.WARN, "SUSPENDED (asleep (level 1))")
    assert "/wake_up" in found.advice
    cordoned = status("CORDONED", "SUSPENDED", cordoned=True, load=load)
    assert instance_finding(cordoned).found == "CORDONED, SUSPENDED (asleep (level 1), cordoned)"
    [finding] = placeability("m", [asleep])
    assert (finding.level, finding.found) == (Finding.FAIL, "none placeable: 1 SUSPENDED")
    assert _state_of(asleep) == "SUSPENDED (asleep (level 1))"


def test_what_is_unknown_of_a_load_is_reported() -> None:
    assert list(load_findings(status("READY", load=agent_pb2.Load(healthy=True)))) == []
    load = agent_pb2.Load(
        healthy=True, unknown=["kv_usage", "external_prefix_cache_hits"], problem="load unknown: /metrics: TimeoutError"
    )
    [problem, missing] = load_findings(status("READY", load=load))
    assert (problem.level, problem.found) == (Finding.WARN, "load unknown: /metrics: TimeoutError")
    assert (missing.level, missing.found) == (Finding.WARN, "its /metrics has no number for: kv_usage")
    assert "--max-kv-usage" in missing.advice
    load = agent_pb2.Load(problem="/health: TimeoutError")
    unhealthy = status("UNHEALTHY", "UNHEALTHY", load=load)
    assert instance_finding(unhealthy).found == "UNHEALTHY: /health: TimeoutError"
    assert list(load_findings(unhealthy)) == []


def test_the_weight_of_an_instance_is_reported() -> None:
    ready = status("READY", weight=0.1, weight_reason="canary")
    assert instance_finding(ready).found.startswith("READY (weight 0.1: canary), vLLM")
    assert instance_finding(status("UNHEALTHY", "UNHEALTHY", weight=0.1)).found == "UNHEALTHY (weight 0.1)"


def test_wrong_kv_is_a_failure_that_names_the_sender_while_it_runs(bootstrap: str) -> None:
    receiver, sender = instance("a", bootstrap), instance("b", bootstrap)
    receiver.kv_transfer.engine_id, sender.kv_transfer.engine_id = "a1", "b1"
    receiver.kv_transfer.wrong_from.add(bootstrap_url=bootstrap, engine_id="b1", requests=2)
    wrong, *others = transfers([receiver, sender])
    assert (wrong.level, wrong.check) == (Finding.FAIL, "a KV transfer")
    assert "KV from b was wrong" in wrong.found
    assert [finding.level for finding in others] == [Finding.OK, Finding.OK]
    assert [(one.instance_id, other.instance_id) for one, other in pairs_of([receiver, sender])] == [("a", "b")]
    sender.kv_transfer.engine_id = "b2"
    assert [finding.level for finding in transfers([receiver, sender])] == [Finding.OK, Finding.OK], (
        "as advised, it was restarted"
    )
    assert [(one.instance_id, other.instance_id) for one, other in pairs_of([receiver, sender])] == [
        ("a", "b"),
        ("b", "a"),
    ]


def test_a_sender_of_wrong_kv_whose_id_is_unknown_is_known_by_its_url(bootstrap: str) -> None:
    receiver, sender = instance("a", "http://a:1", role=agent_pb2.KV_ROLE_CONSUMER), instance("b", bootstrap)
    receiver.kv_transfer.wrong_from.add(bootstrap_url=bootstrap, engine_id="b1", requests=1)
    assert [finding.level for finding in transfers([receiver, sender])] == [Finding.FAIL, Finding.OK, Finding.OK]


def test_versions_that_are_not_tested_are_named_with_what_is_off() -> None:
    pool = [
        agent_pb2.Instance(engine_version=version)
        for version in ("0.32.0+cpu", "0.32.1", "0.22.1", "0.22.1", "0.33.0", "0.40.2", "", "of one's own")
    ]
    older, newer, newest = versions("m", pool)
    assert older.found.startswith(
        "2 of 8 run vLLM 0.22.1, older than the tested 0.32: KV events only with their addresses"
    )
    assert newer.found.startswith(
        "1 of 8 run vLLM 0.33.0, newer than the tested 0.32: layer-wise push refuses to start; with"
    )
    assert "0.40.2, newer than the tested 0.32" in newest.found
    assert {finding.level for finding in (older, newer, newest)} == {Finding.WARN}


@pytest.mark.parametrize(
    ("protocol", "other", "passes"),
    [
        (agent_pb2.KV_PROTOCOL_MOONCAKE, "0.32.1", True),
        (agent_pb2.KV_PROTOCOL_MOONCAKE, "0.22.1", False),
        (agent_pb2.KV_PROTOCOL_NIXL, "0.32.1", False),
        (agent_pb2.KV_PROTOCOL_NIXL, "0.32.0", True),
    ],
)
def test_kv_passes_between_versions_that_read_each_other(
    protocol: agent_pb2.KvProtocol.ValueType, other: str, passes: bool
) -> None:
    one, two = instance("a", "http://a"), instance("b", "http://b")
    for each, version in ((one, "0.32.0"), (two, other)):
        each.kv_transfer.protocol, each.engine_version = protocol, version
    assert bool(list(pairs_of([one, two]))) is passes


@pytest.mark.parametrize("sections", [{}, {"server": {"redis_version": "8.0", "redis_mode": "sentinel"}}])
def test_a_sentinel_in_the_place_of_a_redis_is_told_as_such(
    sections: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A Sentinel has no section on memory.
    monkeypatch.setattr(redis.Redis, "info", lambda _, section: sections.get(section, {}))
    finding = redis_finding("redis://sentinel:26379")
    assert (finding.level, finding.check) == (Finding.FAIL, "Redis sentinel:26379")
    assert "Sentinel" in finding.found


def test_a_parameter_of_a_redis_url_that_is_none_is_told() -> None:
    urls = RedisUrls.of("redis://:secret@127.0.0.1:1?db=x", "redis://:secret@127.0.0.1:1?db=x", "m")
    assert urls is not None
    sentinel, none = redis_findings(urls)
    finding = redis_finding(urls.servers[0])
    assert (sentinel.level, none.level, finding.level) == (Finding.WARN, Finding.FAIL, Finding.FAIL)
    assert "'db'" in sentinel.found
    assert "'db'" in finding.found
    assert "secret" not in f"{sentinel}{none}{finding}"
