"""Logs as a process writes them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys

import pytest

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
    assert all(
        re.match(r"""'{"timestamp": "[^"]*", "level": "info", "service": "service", "event": "(one|two)"}""", line)
        for line in lines
    )


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_on_a_terminal_a_line_is_time_level_event_and_fields(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    code = CODE.replace("return False", "return True").replace('"one"', '"one", engine="http://e:1"')
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **variables},
    )
    first, _ = map(ast.literal_eval, done.stdout.splitlines())
    assert ("\x1b[" in first) is coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[info +\] one +engine=http://e:1 service=service\n", plain)


LIBRARIES = """
import logging
from pointsman_common.io.logs import configure_logs
class Sent(Exception):
    code = 400
configure_logs("service")
log = logging.getLogger("aiohttp.server")
log.info("nothing")
log.warning("late by %d s", 3)
for error in (Sent(), ValueError("no")):
    try:
        raise error
    except Exception:
        log.exception("a request failed")
"""


def test_what_libraries_warn_of_is_a_line_as_any_other() -> None:
    """aiohttp's server wrote a traceback for each client that spoke another protocol."""
    done = subprocess.run([sys.executable, "-c", LIBRARIES], check=True, capture_output=True, text=True, timeout=60)
    warned, failed = map(json.loads, done.stderr.splitlines())
    assert (warned["level"], warned["event"], warned["logger"]) == ("warning", "late by 3 s", "aiohttp.server")
    assert (failed["level"], failed["event"]) == ("error", "a request failed")
    assert failed["exception"].endswith("ValueError: no")
