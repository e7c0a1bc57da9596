"""An engine of another vLLM than the tested one says so once, and names what it runs without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from pointsman_connector import vllm_version
from pointsman_connector.vllm_version import TESTED, is_tested, warn_if_untested, warn_without


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """What stands in for vLLM, which is not installed here, and without its logger."""
    made = ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", made)
    monkeypatch.setitem(sys.modules, "vllm.logger", None)
    warn_if_untested.cache_clear()
    yield made
    warn_if_untested.cache_clear()


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        (TESTED, True),
        (f"{TESTED}.0", True),
        (f"{TESTED}.1+cpu", True),
        (f"{TESTED}.1.dev3+g12ab", True),
        (f"{TESTED}0.1", False),
        ("0.99.0", False),
        ("1.32.0", False),
        ("dev", False),
        ("", False),
    ],
)
def test_patch_releases_and_builds_count_as_tested(version: str, tested: bool) -> None:
    assert is_tested(version) is tested


@pytest.mark.parametrize(
    ("version", "kind"), [("0.99.1", "a newer"), ("0.22.1", "an older"), ("nightly", "an unknown")]
)
def test_another_version_is_reported_once(vllm: Any, caplog: pytest.LogCaptureFixture, version: str, kind: str) -> None:
    vllm.__version__ = version
    for _ in range(3):
        warn_if_untested()
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"tested with vLLM {TESTED}, this is vLLM {version}, {kind} one" in message


def test_the_tested_one_says_nothing(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm.__version__ = f"{TESTED}.7"
    warn_if_untested()
    assert not caplog.records


def test_a_vllm_without_a_version_is_not_tested(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_untested()
    assert "of an unknown version" in caplog.text


def test_what_is_missing_is_one_line(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm.__version__ = "0.99.1"
    warn_without("its ears", ValueError("no such\n  thing"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith(f"runs without its ears: ValueError: no such thing (vLLM 0.99.1; tested with {TESTED})")
    assert vllm_version.running() == "0.99.1"
