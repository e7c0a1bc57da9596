"""Lines appended to a disk that may be full."""

from __future__ import annotations

import errno
import io
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from pointsman_common.io import line_file
from pointsman_common.io.line_file import KEPT_FILES, LineFile, LineWriter, LostLines
from pointsman_common.io.logs import configure_logs
from pointsman_gateway.core.request.attempt_end_reports import AttemptBreakdown
from pointsman_gateway.io.telemetry.line_log import LineLog
from pointsman_router.io.telemetry.decision_log import DecisionLog


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    file = LineFile(Path("/dev/full"))
    with capture_logs() as logged:
        file.append(b"one")
        file.append(b"two")
    assert file.lost == 2
    assert [entry["event"] for entry in logged] == ["lines are lost"]
    assert "No space left" in logged[0]["reason"]
    file.close()


def test_no_torn_line_is_left(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lines"
    file = LineFile(path)
    file.append(b"first")
    with capture_logs() as logged:
        with room_for(10):
            file.append(b"second")
            file.append(b"third")
        file.append(b"fourth")
        file.append(b"fifth")
    file.close()
    assert path.read_bytes() == b"first\nfourth\nfifth\n"
    assert file.lost == 2
    assert [(entry["event"], entry.get("lost")) for entry in logged] == [
        ("lines are lost", None),
        ("lines are written again", 2),
    ]


def test_what_services_append_to_may_lie_on_a_full_disk() -> None:
    full = Path("/dev/full")
    decisions, breakdown = DecisionLog(1, full), LineLog[AttemptBreakdown](full)
    decisions.noted("d", "fell back", 0.0)
    breakdown.write(
        AttemptBreakdown(
            request_id="r", decision_id="d", model="m", stream=True, outcome="OK", status=200, instances=[]
        )
    )
    decisions.close()
    breakdown.close()
    assert (decisions.lost, breakdown.lost) == (1, 1)
    registry = CollectorRegistry()
    registry.register(LostLines("router", lambda: decisions.lost))
    assert registry.get_sample_value("pointsman_router_lost_lines_total") == 1


class Full(io.StringIO):
    """A file on a disk without room."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        self.write("")


def test_a_log_that_cannot_be_written_is_no_fault_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Full())
    before = structlog.get_config()
    try:
        configure_logs("test")
        structlog.get_logger().info("nobody reads this")
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()


def test_a_file_that_is_renamed_is_opened_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "LOOK_AGAIN_S", 0.0)
    path = tmp_path / "lines"
    file, other = LineFile(path), LineFile(path)
    file.append(b"one")
    path.rename(tmp_path / "lines.1")
    file.append(b"two")
    other.append(b"three")
    path.unlink()
    other.append(b"four")
    assert (tmp_path / "lines.1").read_bytes() == b"one\n"
    assert path.read_bytes() == b"four\n"
    assert file.lost == other.lost == 0
    file.close()
    other.close()


def test_a_file_is_renamed_before_it_grows_too_large_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_file, "LOOK_AGAIN_S", 0.0)
    path = tmp_path / "lines"
    # Two processes append to it.
    first, second = LineFile(path, max_bytes=10), LineFile(path, max_bytes=10)
    for number in range(10, 10 + 2 * KEPT_FILES + 4):
        (first if number % 2 else second).append(b"%d" % number * 2)
    first.close()
    second.close()
    files = [path, *(path.with_name(f"lines.{number + 1}") for number in range(KEPT_FILES))]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    newest = 10 + 2 * KEPT_FILES + 3
    assert [file.read_bytes() for file in files] == [
        b"%d\n%d\n" % ((newest - 2 * age - 1) * 101, (newest - 2 * age) * 101) for age in range(KEPT_FILES + 1)
    ]
    assert first.lost == second.lost == 0


def test_a_line_larger_than_a_file_may_be_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path, max_bytes=4)
    for line in (b"one", b"longer", b"two"):
        file.append(line)
    file.close()
    assert [file.read_bytes() for file in (path, tmp_path / "lines.1", tmp_path / "lines.2")] == [
        b"two\n",
        b"longer\n",
        b"one\n",
    ]


def test_a_file_that_cannot_be_renamed_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    file = LineFile(tmp_path / "lines", max_bytes=4)
    with capture_logs() as logged:
        for _ in range(3):
            file.append(b"one")
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"one\n"
    assert file.lost == 2
    assert "Permission denied" in logged[0]["reason"]


def test_who_appends_waits_for_no_disk_and_what_waits_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = threading.Event()
    append = LineFile.append

    def stuck(self: LineFile, line: bytes) -> None:
        assert disk.wait(60)
        append(self, line)

    monkeypatch.setattr(LineFile, "append", stuck)
    monkeypatch.setattr(line_file, "MAX_WAITING_BYTES", 1_000)
    writer = LineWriter(tmp_path / "lines")
    with capture_logs() as logged:
        for number in range(12):
            writer.append(partial(str.encode, str(number)), 100)
    assert writer.lost == 2
    assert [entry["event"] for entry in logged] == ["lines are lost"]
    disk.set()
    writer.close()
    assert (tmp_path / "lines").read_bytes() == b"".join(b"%d\n" % number for number in range(10))
    assert writer.lost == 2


def test_a_line_that_cannot_be_made_costs_no_other(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "lines")
    for text in ("one", "\ud800", "two"):
        writer.append(partial(str.encode, text), 1)
    writer.close()
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"
    assert writer.lost == 1
