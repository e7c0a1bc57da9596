"""The timer of a client that must not be without a byte for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class SilenceTimer:
    """Calls `silent` whenever nothing was sent for `interval_s`, until stop(). `since`: when something was sent last, monotonic
    s. The call counts as sent, also if it sends nothing."""

    __slots__ = ("_handle", "_interval_s", "_sent_at", "_silent")

    def __init__(self, interval_s: float, since: float, silent: Callable[[], None]) -> None:
        self._interval_s = interval_s
        self._sent_at = since
        self._silent = silent
        self._wait()

    def sent(self) -> None:
        """Note that something is sent now. O(1): the timer is not set anew."""
        self._sent_at = time.monotonic()

    def stop(self) -> None:
        """Call nothing any more."""
        self._handle.cancel()

    def _wait(self) -> None:
        left = self._sent_at + self._interval_s - time.monotonic()
        self._handle = asyncio.get_running_loop().call_later(max(0.0, left), self._look)

    def _look(self) -> None:
        # The loop's timers are rounded to ms and may fire early.
        if time.monotonic() >= self._sent_at + self._interval_s:
            self.sent()
            self._wait()
            self._silent()
        else:
            self._wait()
