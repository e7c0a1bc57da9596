"""A fault under load: what clients got, and when all was well again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.chaos.fleet import Fleet

BEFORE, AFTER = 15, 15  # whole answers
_rows: list[tuple[str, ...]] = []
_HEAD = ("fault", "lasted", "answers", "others", "slowest", "served after", "well after")


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
    fleet: Fleet, what: str, *, may: Collection[str] = (), may_double: bool = False
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
    _check(fleet, may, may_double)
    assert not (found := fleet.new_tracebacks()), "\n".join(found)


def _note(what: str, fault: Trouble, fleet: Fleet, well_after: float) -> None:
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


def _check(fleet: Fleet, may: Collection[str], may_double: bool) -> None:
    """Every request was answered once, or with a proper error; none was hung, none wrong, none generated twice."""
    replay = fleet.replay
    wrong = [one for one in replay.failures() if one.got not in may]
    assert not wrong, wrong[:5]
    generations = replay.generations()
    assert generations.keys() <= {one.request_id for one in replay.asked}
    for one in replay.asked:
        made = generations.get(one.request_id, {}).get("whole", 0)
        if one.got == "whole":
            assert made >= 1, one
        if not may_double:
            assert made <= 1, (one, made)


def told() -> list[str]:
    """The table of all faults so far."""
    if not _rows:
        return []
    rows = [_HEAD, *_rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
