"""How many files a service may have open."""

from __future__ import annotations

import resource
import subprocess
import sys

SHOW = """
import resource
from pointsman_common.io.event_loop import run
async def show():
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
run(show())
"""


def test_a_service_may_have_as_many_files_open_as_the_machine_lets_it() -> None:
    """A shell's limit is often 1,024, and each connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)

    def low() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))

    shown = subprocess.run([sys.executable, "-c", SHOW], preexec_fn=low, capture_output=True, check=True, timeout=60)
    assert int(shown.stdout) == most
