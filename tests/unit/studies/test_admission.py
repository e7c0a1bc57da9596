"""The study of admission: measures of sessions, trials that are run once, and the section with its plot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import typer

from pointsman_lab.experiments.trials import drawn
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.mixture import mixed
from pointsman_lab.workload.session_starts import Arrivals, Session
from pointsman_lab.workload.traces import by_session
from studies.admission.__main__ import AdmissionStudySettings, run
from studies.admission.cells import NONE, PLAN, SCENARIOS, plan_cells
from studies.admission.measures import StartBin, bins_by_start, measure_sessions, outcomes
from studies.admission.runs import AdmissionTrial, planned_trials, run_missing
from studies.admission.section import section
from studies.marked_sections import ADMISSION, section_of, with_section
from tests.support.lab_values import ask

ARRIVALS = Arrivals("burst", before_burst_s=10.0, burst_s=10.0, after_burst_s=20.0)


def session(name: str, at_s: float, turns: int) -> Session:
    return [ask(name, turn + 1, at_s + turn, [turn], 100) for turn in range(turns)]


def answer(name: str, turn: int, at_s: float, e2e_s: float, status: int = 200, parked_s: float = 0.0) -> RequestRecord:
    return RequestRecord(
        session=name, turn=turn, t_send=at_s, e2e_s=e2e_s, ttft_s=e2e_s / 2 if status == 200 else None, status=status,
        error="" if status == 200 else "no", prompt_tokens=100, cached_tokens=40, parked_s=parked_s,
    )  # fmt: skip


SESSIONS = [
    session("early", 0.0, 2),
    session("done", 12.0, 2),
    session("refused", 13.0, 2),
    session("left", 14.0, 1),
    session("late", 30.0, 1),
    session("child", 31.0, 1),
]
RECORDS = [
    answer("early", 1, 0.0, 2.0),
    answer("early", 2, 4.0, 4.0),
    answer("done", 1, 12.0, 10.0, parked_s=8.0),
    answer("refused", 1, 13.0, 2.0),
    answer("refused", 2, 16.0, 30.0, status=429, parked_s=30.0),
    answer("left", 1, 14.0, 5.0, status=499),
    answer("done", 2, 25.0, 7.0),
    answer("late", 1, 30.0, 60.0),
]


def test_only_sessions_whose_turns_were_all_answered_are_done_and_have_a_time() -> None:
    found = {turns[0].session: outcome for turns, outcome in zip(SESSIONS, outcomes(SESSIONS, RECORDS), strict=True)}
    assert {name: outcome.fate for name, outcome in found.items()} == {
        "early": "done",
        "done": "done",
        "refused": "refused",
        "left": "left",
        "late": "done",
        "child": "never began",
    }
    assert (found["done"].start_s, found["done"].time_s) == (12.0, 20.0)
    measures = measure_sessions(SESSIONS, RECORDS, ARRIVALS)
    burst = measures["burst"]
    assert (burst["sessions"], burst["time_mean_s"]) == (3, 20.0)
    assert [burst[fate] for fate in ("done", "refused", "left", "failed")] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert burst["ttft_mean_s"] == pytest.approx((5.0 + 1.0 + 3.5) / 3)
    assert (measures["after"]["failed"], measures["after"]["time_mean_s"]) == (0.5, 60.0)
    whole = measures["all"]
    # Of the three that are done, one ended after the last start.
    assert whole["done_per_hour"] == pytest.approx(2 * 3600 / 40)
    assert (whole["parked"], whole["longest_wait_s"], whole["computed_tokens"]) == (0.25, 30.0, 6 * 60)
    late = session("later", 250.0, 1)
    bins = bins_by_start(outcomes([*SESSIONS, late], [*RECORDS, answer("later", 1, 250.0, 5.0)]))
    assert bins == [StartBin(6, 3, 8.0 + 20.0 + 60.0), StartBin(), StartBin(1, 1, 5.0)]


def test_sustained_arrivals_have_no_phases() -> None:
    assert list(measure_sessions(SESSIONS, RECORDS, Arrivals("sustained"))) == ["all"]


def test_a_mixture_adds_sessions_that_share_nothing_with_the_others() -> None:
    main = [request for number in range(30) for request in session(f"a{number}", 10.0 * number, 2)]
    other = [request for number in range(50) for request in session(f"a{number}", number, 3)]
    requests = mixed(main, other, 0.4, 1)
    assert requests == mixed(main, other, 0.4, 1) != mixed(main, other, 0.4, 2)
    sessions = by_session(requests)
    added = {name: turns for name, turns in sessions.items() if name.startswith("mixed")}
    assert (len(sessions), len(added)) == (50, 20)
    assert {name: turns for name, turns in sessions.items() if name not in added} == by_session(main)
    of_main = {block for request in main for block in request.hash_ids}
    assert not of_main & {block for turns in added.values() for turn in turns for block in turn.hash_ids}
    assert all(0 <= turns[0].timestamp_ms <= 290_000 and len(turns) == 3 for turns in added.values())
    assert {
        len(turns) for name, turns in by_session(mixed(main, other, 0.4, 1, one_turn=True)).items() if name in added
    } == {1}
    with pytest.raises(ValueError, match="share"):
        mixed(main, other, 1.0, 1)


def test_cells_of_a_scenario_see_the_same_draw_and_have_keys_of_their_own(tmp_path: Path) -> None:
    cells = plan_cells(tmp_path, 2, quick=True)
    assert len({cell.key for cell in cells}) == len(cells)
    assert {cell.scenario for cell in cells} >= {"burst", "burst, sub-agents", "knee"}
    bursts = [cell for cell in cells if cell.scenario == "burst"]
    assert len(bursts) > 4
    assert all(drawn(cell.cell.workload, 3) == drawn(bursts[0].cell.workload, 3) for cell in bursts)
    # Without traces nothing but made-up sessions can be run.
    assert plan_cells(tmp_path) == []
    planned = {name for tier in PLAN for name in tier.scenarios}
    assert planned == set(SCENARIOS)
    assert all(NONE in tier.admissions for tier in PLAN[:2])


def test_a_trial_is_run_once_and_the_section_keeps_its_place(tmp_path: Path) -> None:
    out = tmp_path / "findings.md"
    out.write_text("before\n<!-- admission -->\nold\n<!-- end of admission -->\nafter\n")
    ways = (NONE, "ThunderAgent", "12 requests")
    settings = AdmissionStudySettings(
        traces=tmp_path,
        quick=True,
        instances=2,
        seeds=1,
        only=f"^burst / foresight / ({'|'.join(ways)})$",
        results=tmp_path / "trials.jsonl",
        out=out,
    )
    cells = [
        cell
        for cell in plan_cells(tmp_path, 2, quick=True)
        if (cell.scenario, cell.policy) == ("burst", "foresight") and cell.admission in ways
    ]
    run(settings)
    text = out.read_text()
    assert text.startswith("before\n<!-- admission -->\n## Admission")
    assert text.endswith("\n<!-- end of admission -->\nafter\n")
    assert "A quick run" in text
    for name in ways:
        assert f"| {name} |" in text
    assert "<svg" in (tmp_path / "findings_admission.svg").read_text()
    assert "<svg" in (tmp_path / "findings_admission_frontier.svg").read_text()
    # A document that does not exist yet has the section alone: hours of trials must not end in an error.
    run(settings.model_copy(update={"out": tmp_path / "new" / "findings.md"}))
    assert (tmp_path / "new" / "findings.md").read_text().strip().startswith("<!-- admission -->\n## Admission")
    seen: list[AdmissionTrial] = []
    run_missing(cells, range(1), settings.results, seen.append)
    assert seen == []
    trials = planned_trials(cells, range(1), settings.results)
    assert len(trials) == len(cells)
    assert all(
        trial.measures["all"]["sessions"] == sum(started.sessions for started in trial.by_start) > 10
        for trial in trials
    )


def test_a_trial_that_another_process_has_begun_is_left_to_it(tmp_path: Path) -> None:
    planned = plan_cells(tmp_path, 2, quick=True)[0]
    # The trial is run three times here, and what it measures does not matter.
    short = replace(
        planned.cell.workload, source=lambda _: [turn for turns in SESSIONS for turn in turns], arrivals=Arrivals()
    )
    cells = [replace(planned, cell=replace(planned.cell, workload=short))]
    file = tmp_path / "trials.jsonl"
    run_missing(cells, range(1), file, lambda _: None)
    first = file.read_bytes()
    claims = tmp_path / "trials.claims"
    assert list(claims.iterdir()) == []
    claimed: list[str] = []

    def others_see(trial: AdmissionTrial) -> None:
        claimed.extend(file.name for file in claims.iterdir())

    # A line that was cut off, and a claim that a dead process has left.
    file.write_bytes(first[:-20])
    run_missing(cells, range(1), file, others_see)
    assert len(claimed) == 1
    file.write_bytes(b"")
    for owner, runs in (("1", 0), ("999999999", 1)):
        (claims / claimed[0]).write_text(owner)
        seen: list[AdmissionTrial] = []
        run_missing(cells, range(1), file, seen.append)
        assert len(seen) == runs


def test_without_trials_there_is_no_section(tmp_path: Path) -> None:
    with pytest.raises(typer.Exit):
        run(
            AdmissionStudySettings(
                traces=tmp_path, render_only=True, results=tmp_path / "none.jsonl", out=tmp_path / "none.md"
            )
        )


def test_the_section_tells_differences_that_are_paired_by_seed() -> None:
    def trial(admission: str, seed: int, time_s: float) -> AdmissionTrial:
        whole = {"sessions": 9.0, "done": 1.0, "time_mean_s": time_s, "refused": 0.0}
        return AdmissionTrial("knee", "foresight", admission, seed, "", "c0ffee", 1.0, {"all": whole}, [])

    trials = [trial(NONE, seed, 100.0 * (1 + seed)) for seed in range(3)]
    trials += [trial("CONCUR", seed, 100.0 * (1 + seed) - 40 - seed) for seed in range(3)]
    text = section(trials, 2)
    assert "| CONCUR | 3 | 100.0% | 0.0% | - | 159 (-41 ± 2) | 80% |" in text
    assert "2 planned trials are missing" in text
    assert "### burst" not in text


def test_a_document_keeps_its_section() -> None:
    document = with_section("a\n<!-- admission -->\n<!-- end of admission -->\nb", ADMISSION, "text\n")
    assert document == "a\n<!-- admission -->\ntext\n<!-- end of admission -->\nb"
    assert section_of(document, ADMISSION) == "text"
    assert (
        with_section("no marks\n", ADMISSION, "text")
        == "no marks\n\n<!-- admission -->\ntext\n<!-- end of admission -->\n"
    )
    assert section_of("no marks", ADMISSION) == ""
