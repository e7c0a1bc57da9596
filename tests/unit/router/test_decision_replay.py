"""Decisions written to a log, read back and made again, for every policy there is; and the command that does it."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import typer
from msgspec.structs import replace
from typer.testing import CliRunner

from pointsman.router.v1 import fleet_pb2
from pointsman_cli import policy_commands
from pointsman_cli.fleet_commands import add_fleet_commands
from pointsman_lab.rival_policies.registry import POLICIES, make_policy
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.decision_replay import differences, inputs_digest, redecide
from pointsman_router.core.placement_types import LISTED_PREFILLS, NO_FACTS, Decision, Load
from pointsman_router.core.policy import registry
from pointsman_router.core.policy.decision_rng import rng_of
from pointsman_router.core.router_state import RouterState, StateSettings
from pointsman_router.io.console.decision_stream import DecisionStream
from pointsman_router.io.telemetry.decision_log import (
    ClosedLine,
    DecidedLine,
    DecisionFilter,
    DecisionLog,
    LoggedDecision,
    MalformedLine,
    decided_line,
    line_bytes,
    read_log,
)
from tests.support.router_values import join, place, request, set_policy, state
from tests.support.waiting import eventually

app = typer.Typer()
add_fleet_commands(app)


def mixed_run(log: DecisionLog, requests: int = 12) -> list[Decision]:
    """Every registered policy in turn on one fleet with load, owners, failures, drains and finished requests."""
    router = RouterState(make_policy("unified"), StateSettings(), router_id="t", seed=7)
    rng = random.Random(1)
    for number, name in enumerate("abcd"):
        join(router, name, number, keys=[*range(40 * number)])
        kv_usage = rng.random() if number else None
        router.handle(ev.LoadReported(number, name, Load(0.1 * number, running=number, kv_usage=kv_usage)), 1.0)
    made: list[Decision] = []
    for turn, name in enumerate(sorted(POLICIES)):
        for open_one in list(router.reservations):
            router.handle(ev.Finished(open_one.request_id, "CANCELLED"), 2.0 + turn)
        set_policy(router, make_policy(name), 2.0 + turn)
        router.handle(ev.DrainsChanged({} if turn % 2 else {"d": "1"}), 2.0 + turn)
        for number in range(requests):
            asked = request(
                f"{name}-{number}",
                tokens=rng.choice((50, 3_000, 40_000)),
                keys=tuple(range(rng.choice((0, 20, 60)))),
                session_id=f"s{number % 4}",
                exclude=("a",) if number % 5 == 0 else (),
            )
            for effect in router.handle(ev.PlaceRequested(asked, "g"), 2.0 + turn + number / 100):
                if isinstance(effect, ev.DecisionMade):
                    log.decided(effect.decision, 1_000.0 + turn, 1e-4)
                    made.append(effect.decision)
            if number % 3 == 0:
                router.handle(ev.FirstToken(asked.request_id), 2.0 + turn)
            if number % 2 == 0:
                for effect in router.handle(
                    ev.Finished(asked.request_id, "OK", 50, 16, 3, timings_ms={"done": 1.5}), 3.0
                ):
                    if isinstance(effect, ev.DecisionClosed):
                        log.closed(effect.decision_id, effect.finished, 1_001.0)
    return made


def test_a_log_of_every_policy_reproduces_every_decision_to_the_bit(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    log = DecisionLog(10, file)
    made = mixed_run(log)
    log.close()
    lines = [line for _, line in read_log(file)]
    recorded = [line for line in lines if isinstance(line, DecidedLine)]
    assert {line.decision.policy.name for line in recorded} == set(POLICIES)
    # A policy may hold some of its requests until the run is over.
    assert 11 * len(POLICIES) < len(recorded) == len(made) <= 12 * len(POLICIES)
    assert any(isinstance(line, ClosedLine) and line.finished.timings_ms == {"done": 1.5} for line in lines)
    for line, decision in zip(recorded, made, strict=True):
        assert line.decision.view == decision.view
        assert differences(decision, line.decision) == []
        assert differences(line.decision, redecide(line.decision, policies=POLICIES)) == []
        assert redecide(line.decision, policies=POLICIES).key_count == decision.key_count
        assert line.inputs_digest == inputs_digest(decision) == inputs_digest(line.decision)
    answer = CliRunner().invoke(app, ["decisions", "verify", str(file)])
    assert (answer.exit_code, answer.output) == (
        0,
        f"{len(made)} of {len(made)} decisions are the same when made again\n",
    )


def test_a_changed_decision_is_reported_with_file_line_and_field(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    log = DecisionLog(10, file)
    made = mixed_run(log, requests=1)
    log.decided(replace(made[0], cached_tokens=1), 0.0, 0.0)
    log.decided(replace(made[0], policy=replace(made[0].policy, name="gone")), 0.0, 0.0)
    log.decided(replace(made[0], view=replace(made[0].view, candidates=())), 0.0, 0.0)
    log.close()
    recorded = file.read_bytes()
    lines = recorded.splitlines()
    changed = lines[0].replace(b'"input_tokens":', b'"input_tokens":1')
    assert changed != lines[0]
    file.write_bytes(recorded + changed + b"\n")
    total = len(lines)
    answer = CliRunner().invoke(app, ["decisions", "verify", str(file)])
    assert answer.exit_code == 1
    assert f"line {total - 2}, {made[0].decision_id}: cached_tokens: 1 -> " in answer.output
    assert f"line {total - 1}, {made[0].decision_id}: policy.name: no policy 'gone'" in answer.output
    assert f"line {total}, {made[0].decision_id}: cannot be made again" in answer.output
    assert f"line {total + 1}, {made[0].decision_id}: inputs_digest: " in answer.output
    assert f"{len(made)} of {len(made) + 4} decisions are the same" in answer.output


@pytest.mark.parametrize("changed", [False, True])
def test_decisions_by_the_labs_policies_are_counted_apart_where_the_lab_is_not_installed(
    changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "decisions.jsonl"
    log = DecisionLog(10, file)
    made = mixed_run(log, requests=1)
    if changed:
        log.decided(replace(made[0], cached_tokens=1), 0.0, 0.0)
    log.close()
    monkeypatch.setattr(policy_commands, "installed_policies", lambda: registry.POLICIES)
    answer = CliRunner().invoke(app, ["decisions", "verify", str(file)])
    assert answer.exit_code == changed
    left_out = sum(decision.policy.name in registry.LAB_POLICIES for decision in made)
    own = len(made) - left_out
    assert left_out
    assert answer.output.splitlines()[changed:] == [
        f"{own} of {own + changed} decisions are the same when made again",
        f"{left_out} more are of policies that are not installed: pointsman[lab]",
    ]


def test_a_malformed_line_is_reported_with_file_line_and_reason(tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    log = DecisionLog(10, file)
    mixed_run(log, requests=1)
    log.close()
    good = file.read_bytes().splitlines()[0]
    for bad, said in (
        (b'{"event": "decided"', "line 2: "),
        (good.replace(b'"input_tokens":', b'"input_tokens":"x","was":'), "line 2: Expected `int`, got `str`"),
        (b'{"event":"opened"}', "line 2: Invalid value 'opened'"),
        (b"", "line 2: Input data was truncated"),
    ):
        file.write_bytes(good + b"\n" + bad + b"\n")
        with pytest.raises(MalformedLine, match=r"decisions\.jsonl, "):
            list(read_log(file))
        answer = CliRunner().invoke(app, ["decisions", "verify", str(file)])
        assert answer.exit_code == 1
        assert said in answer.stderr
    assert CliRunner().invoke(app, ["decisions", "verify", str(tmp_path / "none")]).exit_code == 1


def test_an_instance_that_reports_nonsense_leaves_the_log_readable(tmp_path: Path) -> None:
    from pointsman.agent.v1 import agent_pb2
    from pointsman_router.io.convert import instance_and_load_messages

    router = state()
    join(router, "a", 1)
    wire = agent_pb2.Load(healthy=True, kv_usage=float("nan"))
    router.handle(ev.LoadReported(1, "a", instance_and_load_messages.load(wire, 1.0)), 1.0)
    answer = place(router, request(tokens=5))
    assert isinstance(answer, ev.Placed)
    assert answer.decision.view.candidates[0].kv_usage is None
    line = DecidedLine(0.0, 0.0, answer.decision, inputs_digest(answer.decision))
    again = msgspec.json.decode(msgspec.json.encode(line), type=DecidedLine)
    assert differences(answer.decision, redecide(again.decision)) == []
    assert inputs_digest(again.decision) == again.inputs_digest


def test_randomness_follows_from_the_decisions_id_alone() -> None:
    assert rng_of("t-1").random() == rng_of("t-1").random() != rng_of("t-2").random()
    first = [place_random(seed) for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]


def place_random(seed: int) -> list[str]:
    router = RouterState(make_policy("random"), StateSettings(), seed=seed)
    for number, name in enumerate("abcdefgh"):
        join(router, name, number)
    answers = [place(router, request(f"r{number}", tokens=1)) for number in range(12)]
    return [answer.step.instance_id for answer in answers if isinstance(answer, ev.Placed)]


def test_decisions_are_filtered_by_time() -> None:
    log = DecisionLog(10)
    router = state()
    join(router, "a", 1)
    for number in range(3):
        answer = place(router, request(f"r{number}", tokens=1))
        assert isinstance(answer, ev.Placed)
        log.decided(answer.decision, 100.0 * number, 0.0)
    wanted = DecisionFilter(since_unix_s=50.0, until_unix_s=150.0)
    assert [record.decision.request.request_id for record in log.newest(wanted.matches)] == ["r1"]


def busy_fleet(instances: int, each: int, policy: str = "unified") -> RouterState:
    """A router with `instances` instances, which have about `each` open prefills each."""
    router = state(policy)
    set_policy(router, router.policy.without_holds(NO_FACTS) or router.policy)
    for number in range(instances):
        join(router, f"i{number:03}", number)
    for number in range(instances * each):
        place(router, request(f"open{number}", tokens=20_000 + number))
    return router


def decided(router: RouterState, number: int) -> Decision:
    asked = request(f"0f3c9a52-7d1e-4b68-9c40-{number}", tokens=20_000 + number % 7_000, session_id=f"s{number}")
    answer = place(router, asked, 1.0 + number)
    assert isinstance(answer, ev.Placed)
    router.handle(ev.FirstToken(asked.request_id), 1.0 + number)
    return answer.decision


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize(("instances", "each"), [(2, 0), (2, 500), (64, 0), (64, 20)])
def test_the_memory_of_decisions_is_about_what_the_log_counts(instances: int, each: int, reported: bool) -> None:
    """`reported`: all instances report between two decisions."""
    router = busy_fleet(instances, each)
    log = DecisionLog(10_000, max_bytes=1_000_000)
    number = 0
    tracemalloc.start()
    try:
        # The first half measures what the state alone keeps. The second half keeps as much, and the log besides.
        grown = []
        for kept in (DecisionLog(1), log):
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(1_200 if instances == 2 else 90):
                number += 1
                for at in range(instances if reported else 0):
                    load = Load(1.0 + number, running=1_000 + number, kv_usage=number / 10_000)
                    router.handle(ev.LoadReported(at, f"i{at:03}", load), 1.0 + number)
                decision = decided(router, number)
                kept.decided(decision, 0.0, 0.0)
                router.handle(ev.Finished(decision.request.request_id, "OK"), 1.0 + number)
            gc.collect()
            grown.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert 0 < len(log) < number // 2  # the oldest have left
    assert 400_000 < grown[1] - grown[0] < 1_200_000


@pytest.mark.parametrize(
    ("instances", "each", "policy"), [(1, 0, "unified"), (2, 500, "unified"), (20, 5, "foresight")]
)
def test_how_long_a_line_will_be_is_known_about_before_it_is_made(instances: int, each: int, policy: str) -> None:
    decision = decided(busy_fleet(instances, each, policy), 1)
    assert 0.7 < len(decided_line(LoggedDecision(decision, 0.0, 0.0))) / line_bytes(decision) < 1.3


def test_the_newest_decision_stays_however_large_it_is() -> None:
    log = DecisionLog(10, max_bytes=1)
    router = busy_fleet(4, 0)
    for number in range(3):
        log.decided(decided(router, number), 0.0, 0.0)
        assert len(log) == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_decision_before_many_open_prefills_is_the_same_when_made_again(policy: str) -> None:
    router = busy_fleet(2, 2 * LISTED_PREFILLS, policy)
    recorded = msgspec.json.decode(decided_line(LoggedDecision(decided(router, 1), 0.0, 0.0)), type=DecidedLine)
    assert any(candidate.prefill_backlog.unlisted.prefills for candidate in recorded.decision.view.candidates)
    assert differences(recorded.decision, redecide(recorded.decision, policies=POLICIES)) == []
    assert inputs_digest(recorded.decision) == recorded.inputs_digest


def test_a_request_that_was_decided_again_is_found_after_its_first_decision_left() -> None:
    log = DecisionLog(2)
    router = state()
    join(router, "a", 1)
    decisions = []
    for name in ("same", "other"):
        answer = place(router, request(name, tokens=1))
        assert isinstance(answer, ev.Placed)
        decisions.append(answer.decision)
    for number, decision in enumerate([decisions[0], decisions[1], decisions[0]]):
        log.decided(msgspec.structs.replace(decision, decision_id=f"d{number}"), 0.0, 0.0)
    found = log.get("same")
    assert found is not None
    assert found.decision.decision_id == "d2"


def logged_decision() -> Decision:
    router = state()
    join(router, "a", 1)
    answer = place(router, request("r", tokens=1))
    assert isinstance(answer, ev.Placed)
    return answer.decision


def test_the_end_of_an_earlier_processs_request_closes_no_decision_with_the_same_id() -> None:
    log, decision = DecisionLog(10), logged_decision()
    log.decided(decision, 0.0, 0.0)
    for request_id, closed in (("earlier", False), ("r", True)):
        found = log.closed(decision.decision_id, ev.Finished(request_id, "OK"), 1.0)
        kept = log.get("r")
        assert kept is not None
        assert (found is not None, kept.finished is not None) == (closed, closed)


async def test_a_slow_reader_of_the_log_is_told_what_it_missed() -> None:
    log, decision = DecisionLog(10), logged_decision()
    watch, other = log.watch(lambda one: one.unix_s % 2 == 0), log.watch()
    for number in range(2_010):
        log.decided(replace(decision, decision_id=str(number)), float(number), 0.0)
    first, dropped = await watch.next()
    assert (first.decision.decision_id, dropped) == ("10", 5)
    second, dropped = await watch.next()
    assert (second.decision.decision_id, dropped) == ("12", 0)
    news, dropped = other.read_all()
    assert ([record.decision.decision_id for record in news], dropped) == ([str(n) for n in range(1_010, 2_010)], 1_010)
    assert other.read_all() == ([], 0)
    log.unwatch(watch)
    log.unwatch(other)
    assert not log.watched


async def test_viewers_are_told_of_decisions_that_were_dropped_before_they_were_looked_at() -> None:
    log, decision = DecisionLog(10), logged_decision()
    stream = DecisionStream(log, lambda one: fleet_pb2.Decision(decision_id=one.decision.decision_id))
    viewer = stream.join(lambda: None)

    async def watched() -> bool:
        return log.watched

    await eventually(watched, "the log is watched")
    for number in range(1_200):
        log.decided(replace(decision, decision_id=str(number)), 0.0, 0.0)
    message = json.loads((await viewer.next(60.0)).removeprefix("data: "))
    assert [decision["decisionId"] for decision in message["decisions"]] == [
        str(number) for number in range(1_180, 1_200)
    ]
    assert message["skipped"] == 1_180
    stream.leave(viewer)
