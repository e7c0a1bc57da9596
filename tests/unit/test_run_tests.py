"""What `make test` makes of failed tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools import run_tests
from tools.run_tests import AGAIN_AT_MOST, Run

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


@pytest.fixture
def status_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs the given texts of tests that start processes, and of ones that only compute."""

    def run(processes: str, computes: str = RIGHT) -> int:
        for name, text in (("processes", processes), ("computes", computes)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "test_it.py").write_text(text)
        # Both files have one name.
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib")
        monkeypatch.setattr(run_tests, "ROOT", tmp_path)
        monkeypatch.setattr(
            run_tests, "RUNS", (Run("processes", ("processes",), 0), Run("computes", ("computes",), 0, computes=True))
        )
        return run_tests.main([])

    handler = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, handler)


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
