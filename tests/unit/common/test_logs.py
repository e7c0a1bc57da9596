"""Logs as a process writes them."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
class Noting:
    def write(self, text):
        print(repr(text))
    def flush(self): pass
    def isatty(self): return False
sys.stderr = Noting()
import structlog
from pointsman_common.io.logs import configure_logs
configure_logs("service")
structlog.get_logger().info("one")
structlog.get_logger().info("two")
"""


def test_a_line_is_one_write() -> None:
    """Processes that share a log would tear each other's lines."""
    output = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True, timeout=60).stdout
    lines = output.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("}\\n'") for line in lines)
