"""Makes docs/console.png: the console's page of one decision in a headless Chromium, of a fleet that `pointsman demo` started.

    .venv/bin/python -m tools.screenshot [FILE]

Needs Debian's chromium. The demo's own processes end with it.
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
# Answers after which most prompts are cached somewhere.
ANSWERS = 70
WITHIN_S = 300.0
PAUSE_MS = 2_000


class NoScreenshot(RuntimeError):
    """There is no picture; the message says why."""


def make(file: Path) -> None:
    """Write the picture. Raises NoScreenshot when the demo or the page does not come to something to see."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        raise NoScreenshot("Chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        changes = {"DEMO_KEEP": "true", "DEMO_OUT": folder, "ROUTER_ROUTER_ID": "router-0"}
        environment = os.environ | {f"POINTSMAN_{name}": value for name, value in changes.items()}
        command = [sys.executable, "-m", "pointsman.cli.main", "demo"]
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
    """The last group of the line that matches for the `times`-th time."""
    found = 0
    for line in lines:
        if match := re.search(pattern, line):
            found += 1
            if found == times:
                return match[match.lastindex or 0]
    raise NoScreenshot(f"the demo ended, or took longer than {WITHIN_S:.0f} s, before it printed {pattern!r}")


def _photograph(executable: str, address: str, file: Path) -> None:
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root; what it opens here is this page alone.
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
