"""Lines appended to a disk that may be full."""

from __future__ import annotations

import errno
import io
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from pointsman.common.io import line_file
from pointsman.common.io.line_file import LineFile, LostLines
from pointsman.common.io.logs import configure_logs
from pointsman.gateway.core.request.attempt_report import AttemptBreakdown
from pointsman.gateway.io.telemetry.line_log import LineLog
from pointsman.router.io.telemetry.decision_log import DecisionLog


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
        ("lines are kept again", 2),
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
    assert (decisions.lost, breakdown.lost) == (1, 1)
    registry = CollectorRegistry()
    registry.register(LostLines("router", lambda: decisions.lost))
    assert registry.get_sample_value("pointsman_router_lost_lines_total") == 1
    decisions.close()
    breakdown.close()


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
