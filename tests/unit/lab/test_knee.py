"""The knee of a sweep, by hand and for a queue whose knee is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_lab.experiments.compare_command import CompareSettings, run
from pointsman_lab.experiments.knee import knees, power
from pointsman_lab.experiments.trials import Cell, Trial, Workload
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.workload.session_starts import Arrivals
from pointsman_lab.workload.synthetic_trace import generate
from pointsman_lab.workload.trace_files import save_trace


def cell(policy: str, rate: float, instances: int = 8) -> Cell:
    workload = Workload(Path("t"), Arrivals(rate=rate))
    return Cell(policy, f"rate {rate:g} x{instances}", workload, SimulationConfig(instances=instances))


def trial(one: Cell, seed: int, throughput: float, e2e_s: float) -> Trial:
    return Trial(one.policy, one.load, seed, {"all": {"throughput": throughput, "e2e_mean_s": e2e_s}})


def test_a_knee_by_hand() -> None:
    cells = [cell("p", rate) for rate in (4.0, 1.0, 2.0)]
    four, one, two = cells
    trials = [trial(one, 0, 1.0, 2.0), trial(two, 0, 2.0, 3.0), trial(four, 0, 3.0, 9.0)]
    # Powers 1/2, 2/3, 1/3; the second seed's greatest is at another rate, and a third seed was run at two rates only.
    trials += [trial(one, 1, 1.0, 1.5), trial(two, 1, 2.0, 3.2), trial(four, 1, 3.0, 10.0), trial(one, 2, 9.0, 1.0)]
    [knee] = knees(cells, trials)
    assert (knee.rates, knee.rate, knee.inside, knee.agreement) == ((1.0, 2.0, 4.0), 2.0, True, 0.5)
    assert knee.powers == pytest.approx(((1 / 2 + 2 / 3) / 2, (2 / 3 + 2 / 3.2) / 2, (1 / 3 + 3 / 10) / 2))
    assert knee.saturated == (knee.powers[2] <= 0.5 * knee.powers[1])


def test_what_differs_otherwise_is_another_sweep() -> None:
    cells = [cell("p", rate, n) for n in (4, 8) for rate in (1.0, 2.0, 4.0)] + [cell("q", 1.0), cell("q", 2.0)]
    trials = [trial(cell, 0, cell.workload.arrivals.rate, 1.0) for cell in cells]
    found = knees(cells, trials)
    assert [(knee.policy, knee.rate, knee.inside, knee.saturated) for knee in found] == [("p", 4.0, False, False)] * 2
    assert knees(cells, trials[:2]) == []
    assert power({"all": {"requests": 0.0}}) is None


@given(st.floats(0.1, 100.0))
def test_the_knee_of_a_single_queue_is_at_half_its_capacity(capacity: float) -> None:
    # M/M/1: mean response time 1 / (capacity - load).
    cells = [cell("p", share) for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)]
    loads = [cell.workload.arrivals.rate * capacity for cell in cells]
    [knee] = knees(
        cells, [trial(cell, 0, load, 1 / (capacity - load)) for cell, load in zip(cells, loads, strict=True)]
    )
    assert knee.rate == 0.5


def sweep(trace: Path, folder: Path, **changes: Any) -> None:
    values: dict[str, Any] = {
        "policies": ["unified", "floor"],
        "instances": 1,
        "timing": "think",
        "seeds": 1,
        "processes": 1,
    } | changes
    run(CompareSettings(trace=trace, sweep=True, out=folder / "out", **values))


def test_a_sweep_goes_on_until_it_is_saturated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_trace(tmp_path / "t.jsonl", generate(20, 200.0, seed=1))
    sweep(tmp_path / "t.jsonl", tmp_path)
    found = {knee["policy"]: knee for knee in json.loads((tmp_path / "out" / "results.json").read_text())["knees"]}
    assert len(found["unified"]["rates"]) % 4 == 0
    assert found["unified"]["powers"][-1] <= 0.5 * max(found["unified"]["powers"])
    assert found["floor"]["powers"][-1] > found["unified"]["powers"][-1]
    assert "knees: the rate" in capsys.readouterr().out


def test_a_sweep_that_finds_no_knee_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_trace(tmp_path / "t.jsonl", generate(1, 10.0, seed=1)[:1])
    sweep(tmp_path / "t.jsonl", tmp_path)
    assert "no knee: no seed had enough answers" in capsys.readouterr().out


def test_a_sweep_of_fresh_sessions_finds_knees(tmp_path: Path) -> None:
    sweep(Path("small"), tmp_path, sessions=20)
    found = json.loads((tmp_path / "out" / "results.json").read_text())["knees"]
    assert [knee["policy"] for knee in found] == ["unified", "floor"]
    assert len(found[0]["rates"]) > 4
