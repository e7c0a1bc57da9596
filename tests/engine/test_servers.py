"""Assumptions of the other tests about their engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines.servers import Engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def names(engine: Engine) -> Iterator[str]:
    """Names of the engine's processes."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if int(rest.split()[2]) == engine.process.pid:
                yield name


def test_an_engines_core_computes_itself(engines: list[Engine]) -> None:
    """A separate worker process would poll for work after each step, and take a core from the other engine."""
    for engine in engines:
        found = list(names(engine))
        assert any(name.startswith("VLLM::EngineCor") for name in found), found
        assert not any(name.startswith("VLLM::Worker") for name in found), found
