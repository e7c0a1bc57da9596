"""A fault under load: what clients got, and when all was well again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tests.support.trace_replay import CheckedLoad

BEFORE, AFTER = 8, 8  # whole answers
_rows: list[tuple[str, ...]] = []
_HEAD = ("fault", "lasted", "answers", "others", "slowest", "served after", "well after")


class FleetUnderFault(Protocol):
    """A fleet that trouble comes to."""

    replay: CheckedLoad

    async def repair(self) -> None:
        """Undo what an earlier test may have left."""

    async def wait_until_healthy(self) -> None:
        """Until every part is there and knows the others."""

    async def wait_until_at_rest(self) -> None:
        """Until nothing is open anywhere, and routers know what engines have cached."""

    def repeated_answers(self) -> list[str]:
        """Answers that engines have made more than once, since the last call."""

    def new_tracebacks(self) -> list[str]:
        """Errors that nobody handled, since the last call."""


@dataclass
class FaultTimes:
    """One fault. `began` and `over`: monotonic s."""

    began: float = 0.0
    over: float = 0.0

    def starts_now(self) -> None:
        """The fault happens now."""
        self.began = time.monotonic()

    def ends_now(self) -> None:
        """What is broken is whole again, or being started."""
        self.over = time.monotonic()


@asynccontextmanager
async def fault_under_load(
    fleet: FleetUnderFault, what: str, *, may: Collection[str] = (), may_repeat: bool = False
) -> AsyncIterator[FaultTimes]:
    """Load runs around the block, in which the fault happens and ends. Afterwards all is well while the load still runs; then
    it ends, and nothing is left.

    `may`: what clients may get besides whole answers. `may_repeat`: a generation may have been whole without its gateway
    hearing so, and have been made again.
    """
    await fleet.repair()
    fleet.new_tracebacks()
    replay = fleet.replay
    replay.begin()
    await replay.answers(BEFORE)
    fault = FaultTimes()
    fault.starts_now()
    try:
        yield fault
        if not fault.over:
            fault.ends_now()
        await fleet.wait_until_healthy()
        well_after = time.monotonic() - fault.began
        await replay.answers(AFTER)
    finally:
        await replay.end()
    _note(what, fault, fleet, well_after)
    await fleet.wait_until_at_rest()
    assert not (wrong := [one for one in replay.failures() if one.outcome not in may]), wrong[:5]
    repeated_answers = fleet.repeated_answers()
    assert may_repeat or not repeated_answers, repeated_answers
    assert not (found := fleet.new_tracebacks()), "\n".join(found)


def _note(what: str, fault: FaultTimes, fleet: FleetUnderFault, well_after: float) -> None:
    asked = fleet.replay.asked
    counts = fleet.replay.counts()
    others = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()) if outcome != "whole")
    failed = [one.ended_at for one in fleet.replay.failures()]
    slowest = max(one.ended_at - one.sent_at for one in asked)
    # All requests are answered from when on?
    served = max([end - fault.began for end in failed], default=0.0)
    lasted = fault.over - fault.began
    figures = (f"{lasted:.1f} s", f"{counts['whole']}", others or "-", f"{slowest:.1f} s")
    _rows.append((what, *figures, f"{max(served, 0.0):.1f} s", f"{well_after:.1f} s"))


def recovery_table() -> list[str]:
    """The table of all faults so far."""
    if not _rows:
        return []
    rows = [_HEAD, *_rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
