"""`python -m bench gpu`: which parts run, what becomes of those that fail, how engines share a card, and the page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.figures import Figure
from bench.gpu import command, device
from bench.gpu.command import MODULES, Runner
from bench.gpu.device import Card, Device
from bench.gpu.page import NO_CARD, PARTS, page
from bench.gpu.results import COMPLETE, FAILED, LATE, UNFINISHED, PartResult, Setting, file_of, load, loaded, save
from bench.gpu.shapes import GB, QWEN3, TINY, Shape, memory_plan
from tests.support.processes.process import alive
from tests.support.repository import REPOSITORY

SETTING = Setting(device="cpu", card="2 cores", versions={"torch": "2"}, commit="abc")
STEP = 8_192
# What a part of these tests is: a module that does what its name says.
HEAD = """
import json, os, subprocess, sys, time
from pathlib import Path
words = sys.argv[1:]
figures, state = (Path(words[words.index(flag) + 1]) for flag in ("--figures", "--state"))
def tell(value):
    with figures.open("a") as file:
        file.write(json.dumps({"metric": "m", "value": value, "unit": "s", "note": " ".join(words[:2])}) + "\\n")
"""
BODIES = {
    "good": "tell(1.0)",
    "broken": "tell(2.0)\nprint('line before')\nraise ValueError('the reason')",
    "slow": "tell(3.0)\nPath('PID').write_text(str(os.getpid()))\ntime.sleep(600)",
    # Two sittings.
    "long": "n = len(list(state.glob('done-*')))\n(state / f'done-{n}').touch()\ntell(float(n))\nsys.exit(0 if n else 3)",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the modules `good`, `broken`, `slow` and `long`, on the path of the parts' processes."""
    for name, body in BODIES.items():
        (tmp_path / f"part_{name}.py").write_text(HEAD + body.replace("PID", str(tmp_path / "pid")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def runner(folder: Path, *names: str, setting: Setting = SETTING, limit_s: float = 60.0) -> Runner:
    parts = {part: f"part_{name}" for part, name in zip(PARTS, names, strict=False)}
    return Runner(setting, folder / "out", folder / "state", ["--device", "cpu"], parts, limit_s, say=lambda _: None)


def statuses(results: Sequence[PartResult]) -> list[str]:
    return [result.status for result in results]


def test_a_part_that_fails_hides_no_other(modules: Path) -> None:
    results = runner(modules, "broken", "good").run("ab")
    assert statuses(results) == [FAILED, COMPLETE]
    assert "line before" in results[0].problem
    assert results[0].problem.splitlines()[-1] == "ValueError: the reason"
    # What it had measured is kept, and each has a file of its own.
    assert [figure.value for figure in results[0].figures] == [2.0]
    assert results[1].figures == [Figure("m", 1.0, "s", None, "--device cpu")]
    assert loaded(modules / "out", "cpu", PARTS) == results
    assert json.loads(file_of(modules / "out", "a", "cpu").read_text())["status"] == FAILED


def test_a_part_is_ended_at_its_limit_with_all_its_processes(modules: Path) -> None:
    (result,) = runner(modules, "slow", limit_s=3.0).run("a")
    assert (result.status, [figure.value for figure in result.figures]) == (LATE, [3.0])
    assert not alive(int((modules / "pid").read_text()))


def test_a_complete_part_runs_again_only_if_asked_or_elsewhere(modules: Path) -> None:
    run = runner(modules, "good")
    (first,) = run.run("a")
    (modules / "part_good.py").write_text("raise SystemExit('runs again')")
    assert run.run("a") == [first]
    assert statuses(run.run("a", again=True)) == [FAILED]
    save(file_of(modules / "out", "a", "cpu"), first)
    others = [
        Setting(device="cpu", card="4 cores", versions={"torch": "2"}, commit="abc"),
        Setting(device="cpu", card="2 cores", versions={"torch": "3"}, commit="abc"),
        Setting(device="cpu", card="2 cores", versions={"torch": "2"}, commit="def"),
    ]
    for setting in others:
        assert statuses(runner(modules, "good", setting=setting).run("a")) == [FAILED]


def test_a_failed_part_runs_again(modules: Path) -> None:
    run = runner(modules, "broken")
    assert statuses(run.run("a")) == [FAILED]
    (modules / "part_broken.py").write_text(HEAD + BODIES["good"])
    assert statuses(run.run("a")) == [COMPLETE]


def test_an_unfinished_part_goes_on_from_what_it_stored(modules: Path) -> None:
    run = runner(modules, "long")
    assert statuses(run.run("a")) == [UNFINISHED]
    assert statuses(run.run("a")) == [COMPLETE]
    # From the beginning again, where other results would not belong together.
    assert statuses(
        runner(modules, "long", setting=Setting(device="cpu", card="x", versions={}, commit="z")).run("a")
    ) == [UNFINISHED]


def test_a_result_of_another_version_is_none(tmp_path: Path) -> None:
    file = file_of(tmp_path, "a", "cpu")
    assert load(file) is None
    file.write_text('{"part": "a"}')
    assert load(file) is None


def test_each_part_has_a_module() -> None:
    assert MODULES.keys() == PARTS.keys()
    for name in MODULES.values():
        assert (REPOSITORY / f"{name.replace('.', '/')}.py").exists()


# ---- memory ----


def sized(gib: float) -> int:
    return int(gib * 2**30)


@pytest.mark.parametrize("gib", [23.5, 39.4, 47.4, 79.1, 94.0, 139.7])
def test_engines_fit_on_every_card(gib: float) -> None:
    for engines, tokens in (
        ((4,), (49_000, 33_000, 25_000)),
        ((8, 6, 4), (65_536, 32_768, 16_384)),
        ((1,), (131_072, 32_768)),
    ):
        plan = memory_plan(sized(gib), engines, tokens, STEP)
        assert plan.engines in engines
        assert plan.kv_tokens in tokens
        # vLLM refuses to start without this share of the card's memory free.
        assert plan.engines * plan.fraction <= 0.92
        kept = plan.shape.parameters * plan.shape.value_bytes + plan.kv_tokens * plan.shape.kv_bytes_per_token
        assert kept < plan.fraction * sized(gib)


def test_a_larger_card_has_larger_models_and_longer_prompts() -> None:
    plans = [memory_plan(sized(gib), (4,), (49_000, 33_000, 25_000), STEP) for gib in (23.5, 47.4, 79.1, 139.7)]
    assert [plan.kv_tokens for plan in plans] == [25_000, 49_000, 49_000, 49_000]
    assert [plan.shape.name for plan in plans] == ["Qwen3 0.6B", "Qwen3 1.7B", "Qwen3 4B", "Qwen3 8B"]
    assert memory_plan(sized(139.7), (8, 6, 4), (65_536,), STEP, QWEN3[:1]).engines == 8


def test_a_card_that_is_too_small_is_told_so() -> None:
    with pytest.raises(ValueError, match=r"4 engines of Qwen3 0\.6B need 23 GB, and this card has 15 GB"):
        memory_plan(16 * GB, (8, 4), (49_000, 25_000), STEP)


def test_the_shapes_are_the_published_ones() -> None:
    found = {shape.name: (round(shape.parameters / 1e9, 2), shape.kv_bytes_per_token // 1024) for shape in QWEN3}
    assert found == {
        "Qwen3 0.6B": (0.6, 112),
        "Qwen3 1.7B": (1.72, 112),
        "Qwen3 4B": (4.02, 144),
        "Qwen3 8B": (8.19, 144),
    }


# ---- engines ----


def test_an_engine_on_a_card_has_its_share_and_no_setting_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "card", lambda: Card("card", "1", sized(79.1)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    where = Device(device.CUDA, device.SIZES[device.CUDA])
    plan = where.plan((4,), (49_000,))
    platform = where.spec("a", plan, 32_832).platform
    assert platform.flags["--dtype"] == "bfloat16"
    assert platform.flags["--load-format"] == "dummy"
    assert float(str(platform.flags["--gpu-memory-utilization"])) == pytest.approx(plan.fraction, abs=1e-4)
    assert platform.flags.keys().isdisjoint({"--enforce-eager", "--distributed-executor-backend"})
    assert platform.env == {"CUDA_VISIBLE_DEVICES": "3", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    eager = Device(device.CUDA, device.SIZES[device.CUDA], eager=True).platform(plan)
    assert eager.flags["--enforce-eager"] is None
    assert "--compilation-config" not in eager.flags


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="no CUDA device"):
        device.card()


def test_the_first_card_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/asked"\necho "NVIDIA H200, 580.159.03, 143771"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device.card() == Card("NVIDIA H200", "580.159.03", 143_771 << 20)
    assert (tmp_path / "asked").read_text().endswith("-i 0\n")


def test_every_token_of_a_model_has_a_text(tmp_path: Path) -> None:
    shape = Shape("s", 64, 128, 1, 1, 1, 64, 2_000, True, 4_096, 2)
    folder = device.make_shape(tmp_path / "model", shape)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])}
    assert ids == set(range(2_000))
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"], config["eos_token_id"] < 10) == (2_000, "bfloat16", True)
    assert TINY.config()["dtype"] == "float32"


# ---- the page ----


def result(part: str, kind: str, **more: object) -> PartResult:
    setting = {
        "cpu": SETTING,
        "cuda": Setting(
            device="cuda",
            card="NVIDIA H200",
            driver="580.1",
            memory_gb=150.8,
            versions={"vllm": "0.32.0"},
            commit="abc",
        ),
    }[kind]
    facts: dict[str, object] = {"status": COMPLETE, "date": "2026-01-02", "seconds": 3.0, "figures": []}
    return PartResult(part=part, setting=setting, **(facts | more))  # type: ignore[arg-type]


def test_without_a_card_the_first_line_says_so() -> None:
    for results in ({}, {"cpu": [result("a", "cpu")]}):
        text = page(results)
        assert text.splitlines()[2] == NO_CARD
        assert "## On the card" not in text


def test_the_page_names_card_driver_versions_and_commit() -> None:
    figures = [Figure("overhead", 58.2, "ms", 123.0, "a | b"), Figure("early", -4.0, "ms", 2.0)]
    text = page({"cuda": [result("a", "cuda", figures=figures)]})
    assert text.splitlines()[2] == "Run on one NVIDIA H200."
    assert "NVIDIA H200, 151 GB, driver 580.1, vllm 0.32.0, commit abc" in text
    assert "| overhead | 58.2 ms | 123 | 0.47 | a / b |" in text
    # D's token came before P's answer: a ratio would say nothing.
    assert "| early | -4 ms | 2 |  |  |" in text


def test_figures_of_a_group_are_a_table_of_rows_and_columns() -> None:
    figures = [
        Figure("agentic / a / TTFT", 2.0, "s", 1.0, "1.80 to 2.20"),
        Figure("agentic / b / TTFT", 1.0, "s"),
        Figure("agentic / b / hits", 50.0, "%"),
        Figure("other", 3.0, "s"),
    ]
    text = page({"cuda": [result("c", "cuda", figures=figures)]})
    rows = ["| agentic | TTFT | hits |", "|---|---|---|", "| a | 2 s (2.00; 1.80 to 2.20) |  |", "| b | 1 s | 50 % |"]
    assert "\n".join(rows) in text
    assert "| other | 3 s |" in text


def test_a_failed_part_is_told_with_its_last_lines() -> None:
    text = page({"cuda": [result("b", "cuda", status=FAILED, problem="Traceback\nOSError: no")]})
    assert "**failed**" in text
    assert "```text\nTraceback\nOSError: no\n```" in text


def test_the_command_line_knows_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["--parts", "a,z"], "no part z"), (["--device", "cuda", "--smallest"], "--smallest is for")):
        with pytest.raises(SystemExit):
            command.main(words)
        assert said in capsys.readouterr().err


def test_the_page_can_be_written_from_results_elsewhere(tmp_path: Path) -> None:
    save(file_of(tmp_path / "out", "a", "cpu"), result("a", "cpu", figures=[Figure("m", 1.0, "s")]))
    with pytest.raises(SystemExit) as ended:
        command.main(["--render-only", "--out", str(tmp_path / "out"), "--page", str(tmp_path / "gpu.md")])
    assert not ended.value.code
    assert "| m | 1 s |" in (tmp_path / "gpu.md").read_text()
