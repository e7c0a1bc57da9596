"""`pointsman policies` lists every policy with every setting."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pointsman_cli.fleet_commands import policies
from pointsman_lab.rival_policies.registry import POLICIES
from pointsman_router.core.policy.base import bounds


def test_it_lists_every_policy_with_its_settings_and_their_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    policies()
    told = capsys.readouterr().out.splitlines()
    for name, kind in POLICIES.items():
        assert name in told
        for one in fields(kind):
            assert any(line.startswith(f"    {one.name} = {one.default} ({bounds(one)}): ") for line in told)
    assert "    decider = cost (cost or heuristic): what decides on an offload" in told
    assert "    rotate_affinity = False (true or false): the session belongs to the target afterwards" in told
    # What looks like markup is text.
    assert any("[D is decoding]" in line for line in told)


def test_it_lists_those_that_are_named_and_says_so_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    policies(["unified"])
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if line in POLICIES] == ["unified"]
    with pytest.raises(SystemExit):
        policies(["unifid"])
    assert "no policy is called unifid; there are unified, " in capsys.readouterr().err
