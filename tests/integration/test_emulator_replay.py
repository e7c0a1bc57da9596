"""Replays against a live emulated engine, and the whole demo."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from pointsman_lab.emulator.emulated_engine import EmulatedEngine, EmulateSettings, start
from pointsman_lab.live.replay_command import ReplayError, ReplaySettings, config_of, replay, run
from pointsman_lab.report.bundle import Bundle, read_bundle, read_records
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.workload.synthetic_trace import generate
from pointsman_lab.workload.trace_files import load_trace, save_trace
from pointsman_lab.workload.traces import TraceError, by_session
from tests.support.processes.pointsman import pointsman_command
from tests.support.processes.process import alive


@pytest.fixture
async def engine() -> AsyncIterator[EmulatedEngine]:
    running = await start(EmulateSettings(port=0, speedup=20.0))
    yield running
    await running.stop()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    save_trace(tmp_path / "trace.jsonl", generate(4, 2.0, seed=11))
    return tmp_path / "trace.jsonl"


def settings(trace: Path, url: str, **more: Any) -> ReplaySettings:
    fast: dict[str, Any] = {"time_scale": 0.001, "token_scale": 1 / 32}
    return ReplaySettings(**(fast | {"trace": trace, "url": url, "out": trace.parent / "run"} | more))


async def test_a_replay_records_what_every_request_got(engine: EmulatedEngine, trace: Path) -> None:
    reported: list[RequestRecord] = []
    records = (await replay(settings(trace, engine.url), reported.append)).records
    assert reported == records
    assert all(record.ok for record in records)
    turns: dict[str, list[RequestRecord]] = {}
    for record in records:
        turns.setdefault(record.session, []).append(record)
    for session, done in turns.items():
        assert [record.turn for record in done] == list(range(1, len(done) + 1)), session
        # Every later turn finds at least the previous turn's blocks cached.
        for before, after in pairwise(done):
            assert before.prompt_tokens
            assert after.cached_tokens
            assert after.cached_tokens > before.prompt_tokens - 48
            assert after.t_send >= before.t_send + before.e2e_s
    assert all(record.ttft_s is not None and 0 < record.ttft_s <= record.e2e_s for record in records)
    again = (await replay(settings(trace, engine.url, timing="think", max_sessions=1))).records
    assert [(record.session, record.turn) for record in again] == [
        (session, number + 1) for session in turns_in_order(trace) for number in range(len(turns[session]))
    ]


def turns_in_order(trace: Path) -> list[str]:
    return list(by_session(load_trace(trace)))


async def test_failures_are_recorded_and_the_session_goes_on(engine: EmulatedEngine, trace: Path) -> None:
    records = (await replay(settings(trace, engine.url, model="other"))).records
    assert len(records) == len(load_trace(trace))
    assert {(record.status, record.ok) for record in records} == {(404, False)}
    assert "does not exist" in records[0].error


async def test_an_engine_that_dies_leaves_records(trace: Path) -> None:
    engine = await start(EmulateSettings(port=0, speedup=0.05))
    replaying = asyncio.create_task(replay(settings(trace, engine.url, sessions=1)))
    while not engine.model.num_running:  # noqa: ASYNC110 (the model is plain state, it has nothing to await)
        await asyncio.sleep(0.005)
    await engine.stop()
    records = (await replaying).records
    assert records
    assert not any(record.ok for record in records)
    assert all(record.error for record in records)


async def test_a_replay_that_cannot_begin_says_why(engine: EmulatedEngine, trace: Path, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"127\.0\.0\.1:1/v1/models"):
        await replay(settings(trace, "http://127.0.0.1:1"))
    with pytest.raises(ReplayError, match=r"router 127\.0\.0\.1:1: UNAVAILABLE"):
        await replay(settings(trace, engine.url, router="127.0.0.1:1"))
    with pytest.raises(ReplayError, match=r"none\.log: cannot be read"):
        await replay(settings(trace, engine.url, breakdown_file=tmp_path / "none.log"))
    with pytest.raises(TraceError, match=r"none\.jsonl"):
        await replay(settings(tmp_path / "none.jsonl", engine.url))
    save_trace(trace, [msgspec.structs.replace(request, think_ms=None) for request in load_trace(trace)])
    with pytest.raises(TraceError, match="think_ms"):
        await replay(settings(trace, engine.url, timing="think"))


def test_the_command_writes_a_bundle_and_exits_by_what_happened(trace: Path) -> None:
    async def serve(ready: asyncio.Event, done: asyncio.Event, urls: list[str]) -> None:
        engine = await start(EmulateSettings(port=0, speedup=20.0))
        urls.append(engine.url)
        ready.set()
        await done.wait()
        await engine.stop()

    async def main() -> None:
        ready, done, urls = asyncio.Event(), asyncio.Event(), list[str]()
        serving = asyncio.create_task(serve(ready, done, urls))
        await ready.wait()
        asked = settings(trace, urls[0], api_key="secret")
        # The command runs its own event loop, so it runs in another thread.
        await asyncio.to_thread(run, asked)
        assert all(record.ok for record in read_records(asked.out))
        config = json.loads((asked.out / "config.json").read_text())
        added = {"git_commit": config["git_commit"], "interrupted": False, "missed_samples": 0}
        assert config == config_of(asked) | added
        assert "secret" not in (asked.out / "config.json").read_text()
        with pytest.raises(typer.Exit) as failed:
            await asyncio.to_thread(run, settings(trace, urls[0], model="other"))
        assert failed.value.exit_code == 1
        done.set()
        await serving

    asyncio.run(main())
    with pytest.raises(typer.Exit) as refused:
        run(settings(trace, "http://127.0.0.1:1"))
    assert refused.value.exit_code == 2


async def test_ctrl_c_keeps_what_had_finished(trace: Path) -> None:
    engine = await start(EmulateSettings(port=0, speedup=20.0))
    flags = {"trace": trace, "url": engine.url, "out": trace.parent / "run", "time-scale": 0.2, "token-scale": 0.03}
    flags |= {"timing": "think", "max-sessions": 1}
    process = await asyncio.create_subprocess_exec(
        # A shell that runs the tests in the background may start them with SIGINT ignored.
        *("env", "--default-signal=INT", *pointsman_command("replay")),
        *(str(part) for name, value in flags.items() for part in (f"--{name}", value)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        process_group=0,
    )
    # A cache hit means that the second turn has begun, so the first one has ended.
    while not engine.model.counters.local_cache_hit:  # noqa: ASYNC110 (plain state)
        await asyncio.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.stdout
    text = (await process.stdout.read()).decode()
    assert await process.wait() == 130, text
    await engine.stop()
    assert "interrupted" in text
    bundle = read_bundle(trace.parent / "run")
    assert 0 < len(bundle.records) < len(load_trace(trace))
    assert all(record.ok for record in bundle.records)
    assert bundle.config["interrupted"]
    assert bundle.summary["requests"] == len(bundle.records)


async def demo(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pointsman_cli.main", "demo", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        process_group=0,
        env=os.environ | {"PATH": "/usr/bin:/bin", "POINTSMAN_ROUTER_POLICY": "unified:affinity_ratio=0.4"},
    )


def descendants(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
    return found


def assert_bundle_is_whole(bundle: Bundle, folder: Path) -> None:
    """Check that what the router and the gateway report of a run agrees with what its client saw."""
    records = bundle.records
    assert {record.route_class for record in records} <= {"LIGHT", "MEDIUM", "HEAVY"}
    assert all(record.mode == "COLOCATED" and record.reason and record.rule for record in records)
    assert bundle.breakdown
    rows = {row["decision"]: row for row in bundle.breakdown["requests"]}
    for record in records:
        row = rows[record.decision]
        assert row["outcome"] == "OK"
        assert row["instances"] == [record.instance]
        assert (row["prompt_tokens"], row["cached_tokens"]) == (record.prompt_tokens, record.cached_tokens)
        assert row["t_recv"] <= row["t_placed"] <= row["t_sent"] <= row["t_first_token"] <= row["t_done"]
        # The gateway's time lies within the time that the client waited.
        assert row["t_done"] - row["t_recv"] <= record.e2e_s + 0.05
    assert bundle.breakdown["parts_s"]["total"]["count"] == len(records)
    assert bundle.breakdown["parts_s"]["prefill_elsewhere"] is None
    assert bundle.caches
    assert bundle.caches.keys() == {record.instance for record in records}
    hits = sum(cache["local_hit_tokens"] for cache in bundle.caches.values())
    assert hits == sum(record.cached_tokens or 0 for record in records)
    assert all(cache["keys"] for cache in bundle.caches.values())
    assert {sample.instance for sample in bundle.samples} == bundle.caches.keys()
    assert max(sample.num_requests for sample in bundle.samples) >= 1
    assert (folder / "gpu_util.csv").read_text().startswith("time_s,instance,gpu,utilisation")


# Seven processes start and stop.
@pytest.mark.timeout(400)
async def test_the_demo_runs_and_leaves_nothing_behind(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "demo"
    process = await demo(
        *("--engines", "2", "--trace", str(trace), "--time-scale", "0.05", "--out", str(out)),
        *("--listen-port", "18600", "--router-port", "18700", "--console-port", "18800"),
    )
    try:
        assert process.stdout
        lines: list[str] = []
        children: set[int] = set()
        async for line in process.stdout:
            lines.append(line.decode())
            children.update(descendants(process.pid))
        assert await process.wait() == 0, "".join(lines)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()
    text = "".join(lines)
    bundle = read_bundle(out)
    records = bundle.records
    assert all(record.ok and record.instance and record.decision for record in records)
    assert_bundle_is_whole(bundle, out)
    assert len({record.instance for record in records}) == 2
    assert any(record.cached_tokens for record in records)
    assert f"{len(records)} requests of 4 sessions" in text
    assert f"pointsman explain {records[-1].decision}" in text
    assert "watch it in the console: http://127.0.0.1:188" in text
    assert "policy unified affinity_ratio=0.4" in text
    assert f'export PATH="{Path(sys.executable).parent}:$PATH"' in text
    assert len(children) >= 6
    assert not {pid for pid in children if alive(pid)}


async def test_a_demo_that_cannot_run_fails_and_says_so(tmp_path: Path) -> None:
    process = await demo("--engines", "1", "--trace", str(tmp_path / "none.jsonl"))
    assert process.stdout
    text = (await process.stdout.read()).decode()
    assert await process.wait() == 1
    assert "none.jsonl" in text


@pytest.mark.parametrize("command", ["demo", "replay"])
def test_a_folder_that_cannot_be_written_is_told_before_the_replay(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file/run"
    words = pointsman_command(command, "--out", str(out))
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "500"})
    said = " ".join((ended.stdout + ended.stderr).split())  # a console breaks lines
    assert said == f"pointsman {command}: {out} cannot be written (Not a directory); --out names another folder"
    assert ended.returncode == (1 if command == "demo" else 2)
