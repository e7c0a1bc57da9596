"""A fault under load: which answers clients received, and when the fleet was healthy again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tests.support.trace_replay import CheckedLoad

BEFORE, AFTER = 8, 8  # whole answers before the fault, and after the fleet is healthy
_rows: list[tuple[str, ...]] = []
_HEAD = ("fault", "lasted", "answers", "others", "slowest", "served after", "well after")


class FleetUnderFault(Protocol):
    """A fleet in which a test makes faults."""

    replay: CheckedLoad

    async def repair(self) -> None:
        """Undo faults that an earlier test may have left."""

    async def wait_until_healthy(self) -> None:
        """Wait until every part runs and knows the others."""

    async def wait_until_at_rest(self) -> None:
        """Wait until nothing is open anywhere, and routers know what engines have cached."""

    def repeated_answers(self) -> list[str]:
        """Return answers that engines have made more than once since the last call."""

    def new_tracebacks(self) -> list[str]:
        """Return errors that were not handled, since the last call."""


@dataclass
class FaultTimes:
    """Times of one fault. `began` and `over` (its end): monotonic clock, s."""

    began: float = 0.0
    over: float = 0.0

    def starts_now(self) -> None:
        """Record that the fault begins now."""
        self.began = time.monotonic()

    def ends_now(self) -> None:
        """Record that the fault ends now: the broken part works again, or is being started."""
        self.over = time.monotonic()


@asynccontextmanager
async def fault_under_load(
    fleet: FleetUnderFault, what: str, *, may: Collection[str] = (), may_repeat: bool = False
) -> AsyncIterator[FaultTimes]:
    """Run load around the block, in which the fault begins and ends.

    After the block, wait until the fleet is healthy while the load still runs. Then end the load, wait until the fleet is at
    rest, and check the answers, repeated generations and tracebacks. `may`: outcomes that clients may get besides whole answers.
    `may_repeat`: the generation of a request that was open during the fault may be made twice, because the first one was whole
    but its gateway did not receive its end.
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
        well = time.monotonic()
        await replay.answers(AFTER)
    finally:
        await replay.end()
    _note(what, fault, fleet, well - fault.began)
    await fleet.wait_until_at_rest()
    assert not (wrong := [failure for failure in replay.failures() if failure.outcome not in may]), wrong[:5]
    during = {
        request.request_id for request in replay.asked if request.sent_at < well and request.ended_at > fault.began
    }
    repeated_answers = set(fleet.repeated_answers()) - (during if may_repeat else set())
    assert not repeated_answers, repeated_answers
    assert not (found := fleet.new_tracebacks()), "\n".join(found)


def _note(what: str, fault: FaultTimes, fleet: FleetUnderFault, well_after: float) -> None:
    asked = fleet.replay.asked
    counts = fleet.replay.counts()
    others = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()) if outcome != "whole")
    failed = [failure.ended_at for failure in fleet.replay.failures()]
    slowest = max(request.ended_at - request.sent_at for request in asked)
    # From this time on all requests got whole answers.
    served = max([end - fault.began for end in failed], default=0.0)
    lasted = fault.over - fault.began
    figures = (f"{lasted:.1f} s", f"{counts['whole']}", others or "-", f"{slowest:.1f} s")
    _rows.append((what, *figures, f"{max(served, 0.0):.1f} s", f"{well_after:.1f} s"))


def recovery_table() -> list[str]:
    """Return the table of all faults so far, as lines; empty if there were none."""
    if not _rows:
        return []
    rows = [_HEAD, *_rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
