"""Which benchmarks a command line asks for."""

from __future__ import annotations

import pytest

from bench.named import BENCHMARKS, LONG, names_of


def test_without_a_name_all_short_ones_run() -> None:
    assert names_of([]) == list(BENCHMARKS)
    assert names_of(["hostile", "decide"]) == ["hostile", "decide"]
    assert "hostile" in LONG


def test_a_name_that_there_is_not_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        names_of(["decides"])
    assert "no benchmark 'decides'" in capsys.readouterr().err
