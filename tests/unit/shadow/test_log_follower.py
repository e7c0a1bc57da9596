"""A log is followed over its rotations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pointsman_shadow.io import log_follower
from pointsman_shadow.io.log_follower import follow


async def test_lines_written_from_now_on_over_rotations(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before\n")
    lines: Any = follow(log)

    async def after(change: bytes | None, *, rotate: bool = False) -> bytes:
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0.05)
        if rotate:
            log.rename(tmp_path / "log.1")
        if change is not None:
            with log.open("ab") as file:
                file.write(change)
        return await asyncio.wait_for(waiting, 10)

    assert await after(b"one\ntw") == b"one"
    assert await after(b"o\n") == b"two"
    assert await after(b"in a new file\n", rotate=True) == b"in a new file"
    log.write_bytes(b"")  # as `copytruncate` does
    await asyncio.sleep(0.05)
    assert await after(b"x\n") == b"x"
    await lines.aclose()


async def test_lines_for_the_old_file_after_its_rotation_are_read_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logrotate creates the new file at once, and nginx writes to the old one until it receives its signal."""
    log = tmp_path / "log"
    with log.open("wb", buffering=0) as old:
        late = [b"late\n", b"later\n"]
        replaced = log_follower._replaced

        def noticed(file: Any, path: Path) -> bool:
            if (found := replaced(file, path)) and late:
                old.write(late.pop(0))
            return found

        monkeypatch.setattr(log_follower, "_replaced", noticed)
        lines: Any = follow(log)
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0.05)
        log.rename(tmp_path / "log.1")
        log.write_bytes(b"in a new file\n")
        assert await asyncio.wait_for(waiting, 10) == b"late"
        assert await asyncio.wait_for(anext(lines), 10) == b"later"
        assert await asyncio.wait_for(anext(lines), 10) == b"in a new file"
        await lines.aclose()


async def test_a_replaced_file_that_somebody_still_writes_is_left_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_follower, "REPLACED_S", 0.0, raising=False)
    log = tmp_path / "log"
    with log.open("wb", buffering=0) as old:
        replaced = log_follower._replaced

        def noticed(file: Any, path: Path) -> bool:
            old.write(b"old\n")
            return replaced(file, path)

        monkeypatch.setattr(log_follower, "_replaced", noticed)
        lines: Any = follow(log)
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0.05)
        log.rename(tmp_path / "log.1")
        log.write_bytes(b"in a new file\n")
        async with asyncio.timeout(10):
            while await waiting != b"in a new file":
                waiting = asyncio.ensure_future(anext(lines))
        await lines.aclose()


async def test_a_log_that_is_not_there_yet_is_read_from_its_beginning(tmp_path: Path) -> None:
    lines: Any = follow(tmp_path / "log")
    waiting = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0.05)
    (tmp_path / "log").write_bytes(b"first\n")
    assert await asyncio.wait_for(waiting, 10) == b"first"
    await lines.aclose()


async def test_a_line_that_is_too_long_is_left_out_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_follower, "MAX_LINE", 100)
    monkeypatch.setattr(log_follower, "PIECE", 30)
    log = tmp_path / "log"
    lines: Any = follow(log)
    waiting = asyncio.ensure_future(anext(lines))
    await asyncio.sleep(0.05)
    log.write_bytes(b"one\n" + b"x" * 250 + b"\n" + b"y" * 100 + b"\ntwo\n")
    assert await asyncio.wait_for(waiting, 10) == b"one"
    assert await asyncio.wait_for(anext(lines), 10) == b"y" * 100
    assert await asyncio.wait_for(anext(lines), 10) == b"two"
    await lines.aclose()
