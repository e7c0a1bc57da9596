"""Engines with faulty_connector.py: what they are told to do wrong, and what they say that they keep."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.engines.chat_client import fresh_words
from tests.support.engines.servers import ENGINE_PYTHON, LAYERWISE, SERVED_NAME, Engine
from tests.support.repository import REPOSITORY
from tests.support.waiting import until

FAULTY: Mapping[str, Any] = {
    **LAYERWISE,
    "kv_connector": "FaultyConnector",
    "kv_connector_module_path": "faulty_connector",
}
WITHIN_S = 60.0


def installed(folder: Path) -> Path:
    """A folder with the connector package, installed as in an engine's environment, and the faulty connector."""
    # The build writes beside its sources.
    shutil.copytree(REPOSITORY / "connector", folder / "source")
    flags = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(folder / "site")]
    subprocess.run([ENGINE_PYTHON, "-m", "pip", "install", *flags, str(folder / "source")], check=True, timeout=120)
    shutil.copy(Path(__file__).with_name("faulty_connector.py"), folder / "site")
    return folder / "site"


def file(engine: Engine, kind: str) -> Path:
    return Path(engine.spec.env["POINTSMAN_FAULTS"] + kind)


@contextlib.contextmanager
def faulty(engine: Engine, **faults: float | list[int]) -> Iterator[None]:
    """Inside the block the engine does wrong what faulty_connector.py says."""
    beside = file(engine, ".json.new")
    beside.write_text(json.dumps(faults))
    beside.replace(file(engine, ".json"))
    reported(engine)  # By now it has read them.
    try:
        yield
    finally:
        file(engine, ".json").unlink()
        if engine.process.alive:
            reported(engine)


def reported(engine: Engine, rank: int = 0) -> dict[str, Any]:
    """The report of one of the engine's workers, of now."""
    now = time.monotonic()

    def report() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(file(engine, f".worker{rank}.json").read_text())
        return found if found["at"] > now else None

    return until(report, within_s=WITHIN_S, what=f"a report of {engine.spec.name}")


def stepped(engine: Engine) -> None:
    """Wait until the engine has begun another step."""
    now = time.monotonic()

    def begun() -> bool:
        return bool(json.loads(file(engine, ".scheduler.json").read_text())["at"] > now)

    until(begun, within_s=WITHIN_S, what=f"a step of {engine.spec.name}")


def left(engine: Engine) -> dict[str, float]:
    """What the engine keeps, of transfers and of KV that may not be evicted. It must have nothing to do."""
    # Some is only cleared by a step, and gauges move with steps.
    body = {"model": SERVED_NAME, "prompt": fresh_words(3), "max_tokens": 1}
    assert engine.ask("/v1/completions", body).status == 200
    scheduler = json.loads(file(engine, ".scheduler.json").read_text())
    workers = range(len(list(file(engine, "").parent.glob(f"{engine.spec.name}.worker*.json"))))
    kept = {f"{name} of {rank}": count for rank in workers for name, count in reported(engine, rank)["state"].items()}
    kept |= scheduler["state"] | {"kv_usage": engine.metric("vllm:kv_cache_usage_perc")}
    return {name: count for name, count in kept.items() if count}


def assert_nothing_left(*engines: Engine, within_s: float) -> None:
    """All of it is gone in time."""
    deadline = time.monotonic() + within_s
    while kept := {engine.spec.name: found for engine in engines if (found := left(engine))}:
        assert time.monotonic() < deadline, kept
        time.sleep(0.2)
