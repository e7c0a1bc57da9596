"""Draws, measures, the floor, and trials that pair."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic_settings import SettingsError
from typer.testing import CliRunner, Result

from pointsman_common.io.settings import add_settings_command
from pointsman_lab.engine.cost_profile import Profile, load_profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.experiments.compare_command import CompareSettings, cells_of, run
from pointsman_lab.experiments.latency_bounds import FLOOR, POOLED, LatencyBound
from pointsman_lab.experiments.trials import Cell, Trial, Workload, compare, run_cells, run_trial
from pointsman_lab.report.measures import measure
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.workload.session_starts import Arrivals, draw_sessions
from pointsman_lab.workload.synthetic_trace import generate
from pointsman_lab.workload.trace_files import save_trace
from pointsman_lab.workload.traces import by_session
from tests.support import lab_values
from tests.support.lab_values import PLAIN
from tests.support.processes.pointsman import pointsman_command

ask = partial(lab_values.ask, think_s=0.5)
SLOW = Path(__file__).parents[3] / "lab/pointsman_lab/data/slow.json"


# ---- draws ----


@given(
    st.integers(0, 50), st.sampled_from(["trace", "jitter", "resample"]), st.floats(0, 60), st.sampled_from([0.5, 1, 4])
)
@settings(max_examples=40)
def test_a_draw_moves_sessions_and_nothing_else(seed: int, starts: Any, jitter_s: float, rate: float) -> None:
    requests = generate(12, 30.0, seed=3)
    drawn = draw_sessions(requests, Arrivals(starts, jitter_s, rate), seed)
    assert drawn == draw_sessions(requests, Arrivals(starts, jitter_s, rate), seed)
    begins = [turns[0].timestamp_ms for turns in drawn]
    assert begins == sorted(begins)
    assert begins[0] == 0
    before = by_session(requests)
    assert {turns[0].session for turns in drawn} == before.keys()
    once = {turns[0].session: turns for turns in draw_sessions(requests, Arrivals(starts, jitter_s), seed)}
    for turns in drawn:
        old = before[turns[0].session]
        assert [turn.hash_ids for turn in turns] == [turn.hash_ids for turn in old]
        for one, other in zip(turns, old, strict=True):
            assert one.timestamp_ms - turns[0].timestamp_ms == pytest.approx(other.timestamp_ms - old[0].timestamp_ms)
        # A rate changes when sessions start; the draw stays the same.
        assert turns[0].timestamp_ms * rate == pytest.approx(once[turns[0].session][0].timestamp_ms)


def test_jitter_stays_within_its_bounds_and_differs_by_seed() -> None:
    requests = [ask(f"s{number}", 1, 100.0 * number, [], 10) for number in range(50)]
    starts = []
    for seed in range(2):
        drawn = draw_sessions(requests, Arrivals("jitter", 5.0), seed)
        moved = [turns[0].timestamp_ms / 1e3 for turns in drawn]
        starts.append(moved)
        for number, at_s in enumerate(moved):
            assert abs(at_s - moved[0] - 100.0 * number) <= 10.0
    assert starts[0] != starts[1]


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"jitter_s": -1.0}])
def test_impossible_arrivals_name_their_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Arrivals(**wrong)


# ---- measures ----


def record(number: int, mode: str = "COLOCATED", route_class: str = "LIGHT", **more: Any) -> RequestRecord:
    good: dict[str, Any] = {
        "status": 200,
        "ttft_s": 1.0 + number,
        "e2e_s": 3.0 + number,
        "prompt_tokens": 100,
        "cached_tokens": 25,
    }
    fields = {"session": "s", "turn": number, "t_send": 0.0, "output_tokens": 11, "rule": "session_affinity"}
    return RequestRecord(**(good | fields | {"mode": mode, "route_class": route_class} | more))


def test_measures_by_hand() -> None:
    records = [record(number) for number in range(9)]
    records.append(record(9, "OFFLOAD", "HEAVY", rule="offload", cached_tokens=75))
    records.append(record(10, status=503, error="none"))
    measures = measure(records, {"a": 3.0, "b": 1.0})
    whole = measures["all"]
    assert (whole["ttft_p50_s"], whole["ttft_p90_s"]) == pytest.approx((5.5, 9.1))
    assert (whole["tpot_p99_s"], whole["e2e_mean_s"]) == pytest.approx((0.2, 7.5))
    assert (whole["hit_ratio"], whole["offloads"], whole["imbalance"]) == pytest.approx((0.3, 0.1, 1.5))
    assert (whole["failed"], whole["requests"]) == (1, 10)
    # Ends at 3 to 12 s; between the ranks of 5 and 95 % of nine distances: 9 answers in 9 s.
    assert whole["throughput"] == pytest.approx(1.0)
    assert set(measures) == {"all", "LIGHT", "HEAVY_P2P", "by session_affinity", "by offload"}
    assert measures["HEAVY_P2P"]["ttft_p50_s"] == 10.0
    assert measure([], {})["all"] == {"requests": 0.0, "failed": 0.0}


# ---- the floor ----


def test_the_floor_by_hand() -> None:
    asked = SimulationConfig(profile=PLAIN, engine=EngineConfig(max_num_batched_tokens=100), policy=FLOOR)
    turns = [ask("a", 1, 0.0, [1, 2], 128, output=3), ask("a", 2, 3.0, [1, 2, 3], 192)]
    turns += [ask("b", 1, 0.0, [1, 2], 128), ask("c", 1, 20.0, [1, 2], 128)]
    records = {
        (record.session, record.turn): record for record in LatencyBound(list(by_session(turns).values()), asked).run()
    }
    # Two chunks, 3.28 s; b beside it waits for nothing and finds nothing yet; then two tokens more.
    assert (records["a", 1].ttft_s, records["a", 1].e2e_s) == pytest.approx((3.28, 5.28))
    assert records["b", 1].ttft_s == pytest.approx(3.28)
    # Turn 2 begins when turn 1 has ended, and computes 64 tokens.
    assert (records["a", 2].t_send, records["a", 2].ttft_s) == pytest.approx((5.28, 1.64))
    # Blocks that another session computed are cached, except the last one: a prompt's last token is always computed.
    assert (records["c", 1].cached_tokens, records["c", 1].ttft_s) == pytest.approx((112, 1.16))


def test_a_pool_by_hand() -> None:
    engine = EngineConfig(kv_blocks=13, max_model_len=200)
    asked = SimulationConfig(profile=PLAIN, engine=engine, policy=POOLED, instances=2)
    prompts = [("a", [1, 2, 3]), ("b", [4, 5, 6]), ("c", [7, 8, 9]), ("d", [1, 2, 3])]
    turns = [ask(name, 1, 50.0 * at, ids, 192) for at, (name, ids) in enumerate(prompts)]
    pooled, floor = (LatencyBound([[turn] for turn in turns], of).run() for of in (asked, replace(asked, policy=FLOOR)))
    # Each prompt takes 12 of the pool's 26 blocks: b's and c's leave a's first two, which d finds.
    assert [(record.reason, record.cached_tokens) for record in pooled] == [
        (POOLED, 0),
        (POOLED, 0),
        (POOLED, 0),
        (POOLED, 32),
    ]
    assert [(record.reason, record.cached_tokens) for record in floor] == [
        (FLOOR, 0),
        (FLOOR, 0),
        (FLOOR, 0),
        (FLOOR, 176),
    ]


@pytest.mark.parametrize("timing", ["trace", "think"])
def test_no_policy_passes_the_floor(timing: str) -> None:
    workload = Workload(partial(generate, 15, 10.0))
    asked = SimulationConfig(instances=2, timing=timing)
    floor, _ = run_trial(Cell(FLOOR, "", workload, SimulationConfig(policy=FLOOR, timing=timing)), 1)
    for policy in ("unified", "round_robin"):
        records, _ = run_trial(Cell(policy, "", workload, asked), 1)
        bound = sum(record.ttft_s or 0 for record in floor)
        assert len(records) == len(floor)
        assert sum(record.ttft_s or 0 for record in records) >= bound > 0


# ---- trials ----


def cells() -> list[Cell]:
    workload = Workload(partial(generate, 6, 5.0), Arrivals("resample"))
    return [Cell(name, "", workload, SimulationConfig(instances=2, policy=name)) for name in ("random", "unified")]


def test_trials_do_not_depend_on_how_many_processes_there_are() -> None:
    reported: list[Trial] = []
    alone = run_cells(cells(), range(2), processes=1, on_trial=reported.append)
    assert reported == alone
    assert [(trial.policy, trial.seed) for trial in alone] == [(p, s) for p in ("random", "unified") for s in (0, 1)]
    assert run_cells(cells(), range(2), processes=2) == alone
    assert alone[0].measures != alone[1].measures


def test_ctrl_c_keeps_what_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_cells(cells(), range(2), processes=1)

    def interrupted(trial: Trial) -> None:
        if trial.seed == 1:
            raise KeyboardInterrupt

    assert run_cells(cells(), range(2), processes=1, on_trial=interrupted) == whole[:2]


MANY_TRIALS = """
from tests.unit.lab.test_trials import cells, run_cells

run_cells(cells(), range(5_000), processes=2, on_trial=lambda trial: print(trial.seed, flush=True))
"""


def test_processes_end_with_their_parent() -> None:
    command = [sys.executable, "-c", MANY_TRIALS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        process.terminate()
        # The output ends when no process has it open any longer.
        process.communicate(timeout=10)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGTERM


def trial(policy: str, seed: int, value: float, load: str = "") -> Trial:
    return Trial(policy, load, seed, {"all": {"ttft_p90_s": value}})


def test_policies_are_paired_by_seed_and_load() -> None:
    trials = [trial("base", seed, float(seed)) for seed in (1, 2, 3)]
    # Seed 9 has no partner; another load has no baseline.
    trials += [trial("new", 3, 2.0), trial("new", 1, 0.5), trial("new", 9, 99.0), trial("new", 1, 7.0, "rate 2")]
    found = {(comparison.policy, comparison.load): comparison for comparison in compare(trials, "base")}
    assert found["base", ""].difference is None
    assert found["new", "rate 2"].difference is None
    paired = found["new", ""].difference
    assert paired is not None
    # Differences -0.5 (seed 1) and -1 (seed 3): t(1) = 12.706, s = 0.5 / sqrt(2).
    assert (paired.mean, paired.trials) == (-0.75, 2)
    assert paired.half_width == pytest.approx(12.706 * 0.25, rel=1e-3)
    assert found["new", ""].verdict == "no difference"
    assert found["new", ""].value.mean == pytest.approx((2.0 + 0.5 + 99.0) / 3)


def test_verdicts() -> None:
    trials = [trial("base", seed, 10.0 + seed) for seed in range(5)]
    trials += [trial("low", seed, 5.0 + seed * 1.1) for seed in range(5)]
    trials += [trial("high", seed, 20.0 + seed * 1.1) for seed in range(5)]
    trials += [trial("once", 0, 1.0)]
    verdicts = {comparison.policy: comparison.verdict for comparison in compare(trials, "base")}
    assert verdicts == {"base": "", "low": "lower", "high": "higher", "once": "one trial"}


# ---- the command ----


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    save_trace(tmp_path / "t.jsonl", generate(4, 5.0, seed=1))
    return tmp_path / "t.jsonl"


def test_the_command_prints_and_writes_what_it_found(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run(
        CompareSettings(
            trace=trace,
            policies=["unified", "elastic:heavy_new_tokens=4000", FLOOR],
            vary=["rate=1,4", "long_prefill_token_threshold=0,4096"],
            seeds=2,
            processes=1,
            out=out,
            bundles=True,
        )
    )
    printed = capsys.readouterr().out
    assert "rate 4, long_prefill_token_threshold 4096" in printed
    assert "difference to unified" in printed
    found = json.loads((out / "results.json").read_text())
    assert len(found["trials"]) == 3 * 4 * 2
    assert {comparison["baseline"] for comparison in found["comparisons"]} == {"unified"}
    assert (out / "table.txt").read_text().strip() in printed
    assert len(list((out / "bundles").rglob("metrics.jsonl"))) == 24


def test_settings_come_from_a_file_and_flags_win(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'trace = "{trace}"\npolicies = ["unified", "lmetric"]\nseeds = 3\nrate = 2.0\n')
    found = CompareSettings(config=config, seeds=1)
    assert (found.trace, found.policies, found.seeds, found.rate) == (trace, ["unified", "lmetric"], 1, 2.0)
    assert [cell.policy for cell in cells_of(found)] == ["unified", "lmetric"]
    config.write_text("nonsense = 1")
    with pytest.raises(ValidationError, match="nonsense"):
        CompareSettings(config=config)
    config.write_text("seeds = ")
    with pytest.raises(SettingsError, match=r"c\.toml"):
        CompareSettings(config=config)
    with pytest.raises(SettingsError, match=r"none\.toml"):
        CompareSettings(config=tmp_path / "none.toml")


def test_made_up_sessions_are_others_for_each_seed() -> None:
    [cell] = cells_of(CompareSettings(trace=Path("small"), sessions=3, policies=["unified"]))
    first, again, other = (run_trial(cell, seed)[0] for seed in (1, 1, 2))
    assert first == again
    assert len({record.session for record in first}) == 3
    assert [record.prompt_tokens for record in first] != [record.prompt_tokens for record in other]


def compared_by_command(*words: str) -> Result:
    app = typer.Typer()
    add_settings_command(app, "compare", CompareSettings, run, help_="")
    return CliRunner().invoke(app, words)  # Typer expects no name of a single command.


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--policies", "nonsense"], ["policies", "nonsense", "unified"]),
        (["--policies", "unified:nonsense=1"], ["settings.nonsense"]),
        (["--policies", "unified:overload_factor=-1"], ["settings.overload_factor", "outside"]),
        (["--policies", "unified:overload_factor"], ["SETTING=VALUE"]),
        (["--policies", "floor:x=1"], ["floor has no settings"]),
        (["--policies", "unified", "--policies", "unified"], ["named twice"]),
        (["--vary", "nonsense=1"], ["vary", "nonsense", "long_prefill_token_threshold"]),
        (["--vary", "rate"], ["FIELD=VALUE"]),
        (["--vary", "rate=0"], ["vary: rate", "greater than 0"]),
        (["--vary", "kv_blocks=10"], ["max_model_len"]),
        (["--baseline", "sticky"], ["baseline", "sticky"]),
        (["--starts", "never"], ["starts", "resample"]),
        (["--trace", "none.jsonl"], ["none.jsonl"]),
        (["--seeds", "0"], ["seeds"]),
    ],
)
def test_impossible_settings_are_named(wrong: list[str], named: list[str], tmp_path: Path) -> None:
    result = compared_by_command("--processes", "1", "--out", str(tmp_path), *wrong)
    assert result.exit_code == 2, result.output
    assert all(word in result.output for word in named), result.output


def test_a_malformed_trace_is_named_by_file_line_and_field(trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text().splitlines()
    trace.write_text("\n".join([lines[0], lines[1].replace('"turn":', '"turns":')]))
    # In another process, as most trials are.
    result = compared_by_command("--trace", str(trace), "--processes", "2", "--out", str(tmp_path / "o"))
    assert result.exit_code == 2, result.output
    assert "t.jsonl:2" in result.output
    assert "turn" in result.output


def test_ctrl_c_ends_the_command_with_what_it_has(tmp_path: Path) -> None:
    """A real process group, as a terminal has: SIGINT reaches parent and children alike."""
    save_trace(tmp_path / "t.jsonl", generate(10, 5.0, seed=1))
    out, bundles = tmp_path / "out", tmp_path / "out" / "bundles"
    # Whoever runs the tests in the background may have told its children to ignore SIGINT.
    command = ["env", "--default-signal=INT", *pointsman_command("compare")]
    command += ["--trace", str(tmp_path / "t.jsonl"), "--out", str(out)]
    command += ["--policies", "unified", "--seeds", "5000", "--processes", "2", "--bundles"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not list(bundles.rglob("metrics.summary.json")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 130, errors
    assert "interrupted" in printed
    assert "Traceback" not in errors
    kept = json.loads((out / "results.json").read_text())["trials"]
    assert len(kept) < 5_000


def test_the_slow_profile_is_slower() -> None:
    assert load_profile(SLOW).chunk_s(8_192, 0) > 1.5 * Profile().chunk_s(8_192, 0)
