"""Makes docs/console.png: a screenshot of the console's page of one decision, from a fleet that `pointsman demo` starts.

    .venv/bin/python -m tools.screenshot [FILE]

Needs Debian's chromium, which runs headless. The demo and its processes end with the program.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import sync_playwright

DEFAULT = Path(__file__).resolve().parent.parent / "docs/console.png"
MAX_BYTES = 300_000
SIZE = {"width": 1280, "height": 900}
# Number of answers to wait for; after them some instance has most prompts cached.
ANSWERS = 70
# Timeout of the demo and of the page, s.
WITHIN_S = 300.0
# Pause before the screenshot, ms.
PAUSE_MS = 2_000


class NoScreenshot(RuntimeError):
    """The screenshot could not be made; the message says why."""


def make(file: Path) -> None:
    """Write the screenshot to `file`. Raises NoScreenshot without Chromium, if the demo ends early, or if the picture is too
    large."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        raise NoScreenshot("Chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        changes = {"DEMO_KEEP": "true", "DEMO_OUT": folder, "ROUTER_ROUTER_ID": "router-0"}
        environment = os.environ | {f"POINTSMAN_{name}": value for name, value in changes.items()}
        command = [sys.executable, "-m", "pointsman_cli.main", "demo"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0) as demo:
            late = threading.Timer(WITHIN_S, demo.terminate)
            late.start()
            try:
                assert demo.stdout is not None
                lines = iter(demo.stdout)
                address = _wait_for(r"in the console: (http://\S+)", lines)
                _wait_for(r"\sms \S+-\d+$", lines, times=ANSWERS)
                _photograph(executable, address, file)
            finally:
                late.cancel()
                demo.send_signal(signal.SIGTERM)
                demo.communicate()


def _wait_for(pattern: str, lines: Iterator[str], times: int = 1) -> str:
    """Return the last group of the `times`-th line that matches. Raises NoScreenshot if the lines end before it."""
    found = 0
    for line in lines:
        if match := re.search(pattern, line):
            found += 1
            if found == times:
                return match[match.lastindex or 0]
    raise NoScreenshot(f"the demo ended, or took longer than {WITHIN_S:.0f} s, before it printed {pattern!r}")


def _photograph(executable: str, address: str, file: Path) -> None:
    with sync_playwright() as playwright:
        # Chromium does not run its sandbox as root. It opens only this page.
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            page = browser.new_page(color_scheme="light", viewport=SIZE)  # type: ignore[arg-type]
            page.set_default_timeout(WITHIN_S * 1e3)
            page.goto(f"{address}/#/decisions")
            page.locator("tbody tr").filter(has_text="ok").get_by_role("link").first.click()
            page.get_by_text("What other policies would have done").wait_for()
            page.wait_for_timeout(PAUSE_MS)
            picture = page.screenshot()
        finally:
            browser.close()
    if len(picture) > MAX_BYTES:
        raise NoScreenshot(f"the picture has {len(picture):,} bytes, over {MAX_BYTES:,}")
    file.write_bytes(picture)


if __name__ == "__main__":
    try:
        make(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
    except NoScreenshot as error:
        sys.exit(f"screenshot: {error}")
