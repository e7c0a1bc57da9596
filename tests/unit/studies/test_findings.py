"""The findings command in its quick mode, on generated sessions: it runs, resumes where it stopped, and renders again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from pointsman_lab.live.model_accuracy import LiveComparison, to_json
from pointsman_lab.rival_policies.registry import POLICIES
from studies.findings.__main__ import FindingsSettings, run
from studies.findings.cells import LOADS, plan_cells
from studies.findings.figures import StoredTrial
from studies.findings.page import TEMPLATE, render
from studies.findings.tiers import TEMPLATE as TIERS_TEMPLATE
from studies.marked_sections import TIERS, section_of, with_section
from studies.stored_trials import read_trials


def settings(tmp_path: Path, **changes: Any) -> FindingsSettings:
    values: dict[str, Any] = {
        "traces": tmp_path / "none",
        "trials": 1,
        "quick": True,
        "processes": 1,
        "results": tmp_path / "trials.jsonl",
        "calibration": tmp_path / "calibration.json",
        "agreements": [f"emulated={tmp_path}/none.md", f"real={tmp_path}/agreement.md"],
        "out": tmp_path / "docs" / "findings.md",
    }
    return FindingsSettings(**(values | changes))


def test_a_quick_run_makes_the_document_and_is_not_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(tmp_path)
    run(asked)
    kept = list(read_trials(asked.results, StoredTrial))
    assert len(kept) == len(plan_cells(asked.traces, asked.trials, quick=True)) == 22
    text = asked.out.read_text()
    assert "A quick run" in text
    assert "## generated: saturated" in text
    assert "## `foresight`" in text
    assert "| coding agents, made up | full |" in text.partition("## How it was measured")[0]
    plots = set(re.findall(r"\]\((\w+\.svg)\)", text))
    assert len(plots) == 3
    assert {file.name for file in asked.out.parent.glob("*.svg")} == plots
    section = section_of(text, TIERS)
    assert "| `foresight` | host tier 2 x | " in section
    # The section on tiers can be written alone, in its place or at the end of a document without it.
    run(settings(tmp_path, tiers_only=True, render_only=True))
    assert asked.out.read_text() == text
    asked.out.write_text("# Findings\n")
    run(settings(tmp_path, tiers_only=True, render_only=True))
    assert asked.out.read_text() == with_section("# Findings\n", TIERS, section)
    asked.out.write_text(text)
    lines = asked.results.read_bytes()

    # As after a kill: the last line is truncated, and one trial must be run again.
    asked.results.write_bytes(lines[:-20])
    run(settings(tmp_path, render_only=True))
    assert "1 of the trials that were planned are missing" in asked.out.read_text()
    # It is, and the truncated line does not spoil its line.
    run(asked)
    assert len(list(read_trials(asked.results, StoredTrial))) == len(kept)
    assert "planned are missing" not in asked.out.read_text()
    # A trial that two runs have recorded counts once.
    asked.results.write_bytes(lines + lines)
    run(settings(tmp_path, render_only=True))
    assert asked.out.read_text() == text
    # The name that a load had when a trial was run does not matter.
    asked.results.write_bytes(lines.replace(b'"load":"full"', b'"load":"rush hour"'))
    run(settings(tmp_path, render_only=True))
    assert asked.out.read_text() == text
    asked.results.write_bytes(lines)
    monkeypatch.setattr("studies.findings.__main__.run_cells", lambda *_: pytest.fail("nothing is missing"))
    run(asked)
    assert asked.out.read_text() == text

    loads = to_json([("1 requests/s", [LiveComparison("TTFT p50", 0.2, 0.15)])])
    asked.calibration.write_text(json.dumps({"loads": loads}))
    run(settings(tmp_path, render_only=True))
    more = asked.out.read_text().removeprefix(text)
    assert "| 1 requests/s | TTFT p50 | 200 ms | 150 ms | -25.0% |" in more
    assert "The greatest error is 25%; the goal is 15%." in more
    (tmp_path / "agreement.md").write_text("| 1 | unified | TTFT mean |\n")
    run(settings(tmp_path, render_only=True))
    more = asked.out.read_text().removeprefix(text)
    assert "### On real engines\n| 1 | unified | TTFT mean |" in more
    assert "emulated engines\n" not in more


def test_without_trials_there_is_no_document(tmp_path: Path) -> None:
    with pytest.raises(typer.Exit):
        run(settings(tmp_path, render_only=True))


def test_the_whole_study_has_every_policy_at_three_loads_and_foresight_everywhere(tmp_path: Path) -> None:
    cells = plan_cells(tmp_path / "none", 5, quick=False)
    main = {(cell.load, cell.policy) for cell in cells if not cell.threshold}
    for load in ("light", "full", "saturated"):
        assert {name for at, name in main if at == load} >= {*POLICIES, "floor", "pooled"}
    places = {(cell.load, cell.threshold) for cell in cells}
    loads = LOADS.keys() - {"overloaded"}
    assert places == {(load, threshold) for load in loads for threshold in (0, 4_096)}
    assert {(cell.load, cell.threshold) for cell in cells if cell.policy == "foresight"} == places
    assert (
        len({(cell.key, cell.load, cell.policy) for cell in cells}) == len({cell.key for cell in cells}) == len(cells)
    )


def test_no_figure_is_written_into_the_template() -> None:
    """Checks its text and the strings of its expressions. 0 is allowed: the score of an idle instance, and no difference."""
    templates = TEMPLATE.read_text() + TIERS_TEMPLATE.read_text()
    text = re.sub(r"\{#.*?#\}", "", templates, flags=re.DOTALL)
    prose = re.sub(r"\{[%{].*?[%}]\}", lambda tag: " ".join(re.findall(r'"(.*?)"', tag[0])), text, flags=re.DOTALL)
    names = r"0|E2E|p50|p90|p99|lmetric1|(ttft|tpot|e2e)_p\d\d_s"
    assert [word for word in re.findall(r"\w*\d(?:[.,]?\w)*", prose) if not re.fullmatch(names, word)] == []


def trial(policy: str, load: str, seed: int, ttft: float, **more: float) -> StoredTrial:
    measures = {"ttft_p50_s": 0.1, "ttft_p90_s": ttft, "ttft_p99_s": 9.0, "e2e_p90_s": 5.0, "e2e_p99_s": 9.0}
    measures |= {"tpot_p90_s": 0.02, "hit_ratio": 0.5, "failed": 0.0}
    return StoredTrial("agentic", load, 0, policy, seed, "", "abc", {"all": measures | more})


def test_what_is_said_follows_from_the_figures() -> None:
    trials = [
        trial(policy, "full", seed, ttft + seed / 100)
        for policy, ttft in (
            ("floor", 4.0),
            ("pooled", 5.0),
            ("unified", 8.0),
            ("lpwl", 6.0),
            ("foresight", 4.5),
            ("sticky", 8.0),
        )
        for seed in (1, 2, 3)
    ]
    text = render(trials, {"full": LOADS["full"]}, 0, quick=False)
    assert (
        "| agentic, full | 4.02 | 8.02 | `lpwl` (+1.50 ± 0.00) | 4.52 (-3.50 ± 0.00) | 88% | 75% | 75% "
        "| = | = | = | 1.0 x | none |" in text
    )
    assert "is met in 1 of 1 cells, those of TTFT p90 in 1." in text
    assert "`sticky` (affinity alone): full: +0% (=) s, no difference." in text
    assert "missing" not in text
    assert "No rival but `unified`" not in text
    own = [trial for trial in trials if trial.policy in ("floor", "unified", "foresight")]
    assert "No rival but `unified` was run in 1 of them" in render(own, {}, 0, quick=False)
    worse = render([*trials, *(trial("lpwl", "full", seed, 4.2) for seed in (1, 2, 3))], {}, 7, quick=False)
    assert "| lowest |" in worse
    assert "is met in 0 of 1 cells, those of TTFT p90 in 0." in worse
    assert "7 of the trials" in worse
    # Slower answers are reported, but only if the interval leaves no doubt.
    slower = [trial("foresight", "full", seed, 4.5, e2e_p90_s=5.1 + seed / 100, tpot_p90_s=0.04) for seed in (1, 2, 3)]
    doubt = [trial("foresight", "full", seed, 4.5, e2e_p90_s=5.0 + (2 - seed)) for seed in (1, 2, 3)]
    others = [trial for trial in trials if trial.policy != "foresight"]
    assert "| E2E p90, TPOT p90 |" in render([*others, *slower], {}, 0, quick=False)
    assert "| none |" in render([*others, *doubt], {}, 0, quick=False)


def test_what_is_said_of_elsewhere() -> None:
    def cell(name: str, threshold: int, **ttft: float) -> list[StoredTrial]:
        return [
            msgspec.structs.replace(trial(policy, "full", seed, value), trace=name, threshold=threshold)
            for policy, value in ttft.items()
            for seed in (1, 2)
        ]

    trials = [
        *cell("agentic", 0, floor=1.0, unified=5.0, foresight=2.0),
        *cell("2 instances", 0, floor=4.0, unified=8.0, preble=4.2, foresight=5.0),
        *cell("2 instances", 4096, floor=4.0, unified=8.0, preble=7.0, foresight=5.0),
        *cell("half the KV blocks", 0, floor=4.0, unified=9.0),
    ]
    text = render(trials, {}, 0, quick=False)
    assert (
        "| 2 instances | none | 8.00 -> 5.00 (4.00), 75% |\n| 2 instances | 4096 | 8.00 -> 5.00 (4.00), 75% |" in text
    )
    assert "lowest TTFT p90 in 1 of 2 cells; not in 2 instances, full (`preble` -16%)." in text
    assert "E2E p99 1.00 and 1.00 times (2 instances, full);" in text
    # These trials are no part of the main study; conditions that lack a policy are reported nowhere.
    assert "Every goal is met in 1 of 1 cells" in text
    assert "## 2 instances" not in text
    assert "half the KV" not in text
    assert "### Elsewhere" not in render(trials[:6], {}, 0, quick=False)


def test_policies_are_compared_on_the_draws_that_both_have() -> None:
    """A policy that has run on the easy draw only has no advantage from it."""
    trials = [
        trial(policy, "full", seed, ttft * seed)
        for policy, ttft, seeds in (
            ("floor", 1.0, (1, 2, 3, 10)),
            ("unified", 9.0, (1, 2, 3, 10)),
            ("foresight", 2.0, (1, 2, 3)),
            ("lpwl", 3.0, (1,)),
        )
        for seed in seeds
    ]
    text = render(trials, {}, 2, quick=False)
    # 2, 18 and 4 are the means of the first three draws: the fourth, which `foresight` has not run, does not count.
    assert "| agentic, full | 2.00 | 18.00 | `lpwl` (+1.00) | 4.00 (" in text
    assert " | 88% | 75% | - | " in text
    assert "lowest |" not in text
    assert "`lpwl`, without the number of requests: full: -67% (-6.00) s, one trial." in text
    assert "| 50% | 0 | 1 |" in text
