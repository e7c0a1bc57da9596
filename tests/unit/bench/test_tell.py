"""A program of a benchmark prints its result whole, however long it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# A signal ends a write to a full pipe early.
PRINTS = """
import signal
from bench.load_client import tell
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
tell(["a" * 20_000_000])
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_long_result_is_printed_whole_without_a_buffer() -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, env=environment, check=True)
    assert json.loads(done.stdout) == ["a" * 20_000_000]
