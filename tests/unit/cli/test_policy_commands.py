"""`pointsman policies` lists every policy with every setting; `pointsman decisions verify` accepts logs of earlier versions."""

from __future__ import annotations

import gzip
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pointsman.router.v1 import fleet_pb2
from pointsman_cli import policy_commands
from pointsman_cli.fleet_commands import policies
from pointsman_cli.policy_commands import verify
from pointsman_lab.rival_policies.registry import POLICIES
from pointsman_router.core.policy.base import bounds
from pointsman_router.io.telemetry.decision_log import DecidedLine, read_log
from tests.support.repository import REPOSITORY

# Written by version 0.2.0 under each of its policies, and by sessions that were let in, parked and refused.
LOG_0_2_0 = REPOSITORY / "tests/data/decisions_0_2_0.jsonl.gz"


def test_it_lists_every_policy_with_its_settings_and_their_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    policies()
    output = capsys.readouterr().out.splitlines()
    for name, kind in POLICIES.items():
        assert name in output
        for field in fields(kind):
            assert any(line.startswith(f"    {field.name} = {field.default} ({bounds(field)}): ") for line in output)
    assert "    decider = cost (cost or heuristic): what decides on an offload" in output
    assert "    rotate_affinity = False (true or false): the session belongs to the target afterwards" in output
    # What looks like markup is text.
    assert any("[D is decoding]" in line for line in output)


def test_it_lists_those_that_are_named_and_says_so_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    policies(["unified"])
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if line in POLICIES] == ["unified"]
    with pytest.raises(SystemExit):
        policies(["unifid"])
    assert "no policy is called unifid; there are unified, " in capsys.readouterr().err


def test_decisions_of_0_2_0_are_the_same_when_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "decisions.jsonl"
    log.write_bytes(gzip.decompress(LOG_0_2_0.read_bytes()))
    decided = {line.decision.policy.name for _, line in read_log(log) if isinstance(line, DecidedLine)}
    assert len(decided) == 21
    verify(log)
    assert capsys.readouterr().out == "129 of 129 decisions are the same when made again\n"


def test_a_request_that_would_be_held_loses_no_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = fleet_pb2.WhatIfResponse(decided=2, changed=2, held=1)
    answer.changes.add(decision_id="r-1", from_instance_id="a", reason="held", cached_tokens_change=-4_016)
    answer.changes.add(
        decision_id="r-2", from_instance_id="a", to_instance_id="b", reason="idle", cached_tokens_change=-1
    )
    monkeypatch.setattr(policy_commands, "what_if_newest", lambda *_: answer)
    app = typer.Typer()
    app.command()(policy_commands.what_if)
    done = CliRunner().invoke(app, ["--policy", "foresight", "--last", "2"], catch_exceptions=False)
    assert done.output.splitlines()[:2] == ["r-1: a -> held (held)", "r-2: a -> b (idle), -1 cached tokens"]
