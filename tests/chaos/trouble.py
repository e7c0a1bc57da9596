"""A fault under load: what clients got, and when all was well again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tests.chaos.replay import Replay

BEFORE, AFTER = 8, 8  # whole answers
_rows: list[tuple[str, ...]] = []
_HEAD = ("fault", "lasted", "answers", "others", "slowest", "served after", "well after")


class Harmed(Protocol):
    """A fleet that trouble comes to."""

    replay: Replay

    async def mend(self) -> None:
        """Undo what an earlier test may have left."""

    async def well(self) -> None:
        """Until every part is there and knows the others."""

    async def at_rest(self) -> None:
        """Until nothing is open anywhere, and routers know what engines have cached."""

    def doubled(self) -> list[str]:
        """Answers that engines have made more than once, since the last call."""

    def new_tracebacks(self) -> list[str]:
        """Errors that nobody handled, since the last call."""


@dataclass
class Trouble:
    """One fault. `began` and `over`: monotonic s."""

    began: float = 0.0
    over: float = 0.0

    def begins(self) -> None:
        """The fault happens now."""
        self.began = time.monotonic()

    def is_over(self) -> None:
        """What is broken is whole again, or being started."""
        self.over = time.monotonic()


@asynccontextmanager
async def trouble(
    fleet: Harmed, what: str, *, may: Collection[str] = (), may_double: bool = False
) -> AsyncIterator[Trouble]:
    """Load runs around the block, in which the fault happens and ends. Afterwards all is well while the load still runs; then
    it ends, and nothing is left.

    `may`: what clients may get besides whole answers. `may_double`: a generation may have been whole without its gateway
    hearing so, and have been made again.
    """
    await fleet.mend()
    fleet.new_tracebacks()
    replay = fleet.replay
    replay.begin()
    await replay.answers(BEFORE)
    fault = Trouble()
    fault.begins()
    try:
        yield fault
        if not fault.over:
            fault.is_over()
        await fleet.well()
        well_after = time.monotonic() - fault.began
        await replay.answers(AFTER)
    finally:
        await replay.end()
    _note(what, fault, fleet, well_after)
    await fleet.at_rest()
    assert not (wrong := [one for one in replay.failures() if one.got not in may]), wrong[:5]
    doubled = fleet.doubled()
    assert may_double or not doubled, doubled
    assert not (found := fleet.new_tracebacks()), "\n".join(found)


def _note(what: str, fault: Trouble, fleet: Harmed, well_after: float) -> None:
    asked = fleet.replay.asked
    counts = fleet.replay.counts()
    others = ", ".join(f"{count} {got}" for got, count in sorted(counts.items()) if got != "whole")
    failed = [one.ended_at for one in fleet.replay.failures()]
    slowest = max(one.ended_at - one.sent_at for one in asked)
    # All requests are answered from when on?
    served = max([end - fault.began for end in failed], default=0.0)
    lasted = fault.over - fault.began
    figures = (f"{lasted:.1f} s", f"{counts['whole']}", others or "-", f"{slowest:.1f} s")
    _rows.append((what, *figures, f"{max(served, 0.0):.1f} s", f"{well_after:.1f} s"))


def told() -> list[str]:
    """The table of all faults so far."""
    if not _rows:
        return []
    rows = [_HEAD, *_rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
