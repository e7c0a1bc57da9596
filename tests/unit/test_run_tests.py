"""What `make test` makes of failed tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tools import run_tests
from tools.run_tests import AGAIN_AT_MOST, REPORTS, Run

ONCE = """
from pathlib import Path

def test_once():
    tried = Path(__file__).with_name("tried")
    tried.touch(exist_ok=False)
"""
AT_FIRST = ONCE.replace("touch(exist_ok=False)", "exists() or (tried.touch(), 1 / 0)")
MANY_AT_FIRST = f"""
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({AGAIN_AT_MOST + 1}))
def test_many(number):
    tried = Path(__file__).with_name(str(number))
    tried.exists() or (tried.touch(), 1 / 0)
"""
ALWAYS = "def test_always(): assert False"
RIGHT = "def test_right(): pass"
# Never ends by itself.
SLOW = """
import time
from pathlib import Path

def test_before(): pass

def test_slow():
    Path(__file__).with_name("begun").touch()
    time.sleep(600)
"""
RUNS = (Run("processes", ("processes",), 0), Run("that compute", ("computes",), 0, computes=True))
MAIN = """
import sys
from pathlib import Path
from tests.unit.test_run_tests import RUNS
from tools import run_tests

run_tests.ROOT, run_tests.RUNS = Path(sys.argv[1]), RUNS
sys.exit(run_tests.main([]))
"""


def write_tests(folder: Path, processes: str, computes: str) -> None:
    for name, text in (("processes", processes), ("computes", computes)):
        (folder / name).mkdir()
        (folder / name / "test_it.py").write_text(text)
    # Both files have one name.
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib")


@pytest.fixture
def status_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs the given texts of tests that start processes, and of ones that only compute."""

    def run(processes: str, computes: str = RIGHT) -> int:
        write_tests(tmp_path, processes, computes)
        monkeypatch.setattr(run_tests, "ROOT", tmp_path)
        monkeypatch.setattr(run_tests, "RUNS", RUNS)
        return run_tests.main([])

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_right_tests_run_once(status_of: Callable[..., int]) -> None:
    assert status_of(ONCE) == 0


def test_a_test_that_fails_only_at_first_is_named(
    status_of: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert status_of(AT_FIRST) == 0
    assert "PASSED ALONE" in (output := capfd.readouterr().out)
    assert output.rstrip().endswith("processes/test_it.py::test_once")


@pytest.mark.parametrize(
    ("processes", "computes"),
    [
        pytest.param(ALWAYS, RIGHT, id="always"),
        pytest.param(AT_FIRST, ALWAYS, id="one that computes"),
        pytest.param(RIGHT, AT_FIRST, id="one that computes, at first"),
        pytest.param(MANY_AT_FIRST, RIGHT, id="many"),
        pytest.param("import nothing_of_this_name", RIGHT, id="not collected"),
        pytest.param("import os; os._exit(3)", RIGHT, id="crashed"),
    ],
)
def test_all_else_stays_failed(status_of: Callable[..., int], processes: str, computes: str) -> None:
    assert status_of(processes, computes) != 0


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of which all runs are in a test that does not end. As a shell's child in the background it ignores SIGINT."""
    write_tests(tmp_path, SLOW, SLOW)
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / name / "begun").exists() for name in ("processes", "computes")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_reports_stay_after_a_kill(slow: subprocess.Popen[str], tmp_path: Path) -> None:
    os.killpg(slow.pid, signal.SIGKILL)
    slow.wait()
    assert "collected 2 items" in (tmp_path / REPORTS / "that_compute.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_runs_and_names_their_reports(
    slow: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    if number == signal.SIGINT:
        os.killpg(slow.pid, number)  # as a terminal sends it
    else:
        slow.send_signal(number)
    output, _ = slow.communicate(timeout=20)
    report = tmp_path / REPORTS / "that_compute.txt"
    assert f"report of that compute: {report}" in output
    assert output.count("1 passed") == 2
    assert "1 passed" in report.read_text()
    assert slow.returncode in (2, 128 + signal.SIGTERM)
