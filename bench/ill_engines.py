"""What happens in each of many ways in which an engine can be ill: requests that fail, time until it is out and back, and what
console and doctor say. Once with an engine alone in its pool, once with one of three, both at the same time.

    python -m bench ill_engines                              # all ways, 12 minutes
    python -m bench.ill_engines --only "hang" --only 404     # some ways
    python -m bench.ill_engines --save FILE [--services-python PYTHON --services-module pointsman.cli.main]
    python -m bench.ill_engines --page                       # write docs/ill_engines.md from docs/results, and run nothing
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.figures import Figure
from bench.ill_fleet import ENGINES, POLL_S, THREES, IllFleet, Outcome, Services
from bench.ill_ways import WAYS, Way
from pointsman_common.io.logs import configure_logs

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "ill_engines.md"
# Saved runs that the page shows: of this version, and of 0.2.0.
RESULTS, OLD_RESULTS = DOCS / "results" / "ill_engines.jsonl", DOCS / "results" / "ill_engines_0.2.0.jsonl"
CELL = 240  # characters, at most
# Time before an illness; time after it for the engine to be back, and at least; how long before its end doctor is asked, s.
CALM_S, BACK_S, AFTER_S, DOCTOR_BEFORE_S = 2.0, 32.0, 2.0, 2.5


async def ill_engines() -> list[Figure]:
    """Failed and refused requests of each way, and of each pool."""
    outcomes = await run(WAYS, Services())
    Console(width=200).print(table(outcomes))
    return [
        Figure(
            f"{outcome.way}, {outcome.pool}: failed or refused",
            outcome.failed + outcome.refused,
            "requests",
            None,
            _measured(outcome),
        )
        for outcome in outcomes
    ]


async def run(ways: Sequence[Way], services: Services, save: Path | None = None) -> list[Outcome]:
    """Run these ways on one fleet, one after the other; `save` gets the outcomes of each. Raises AssertionError if a process does
    not start."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        fleet = IllFleet(Path(folder), services)
        async with fleet.running():
            async with fleet.sessions():
                await asyncio.sleep(2 * CALM_S)
            known, _ = await fleet.doctor()
            for way in ways:
                found = await _one(way, fleet)
                for outcome in found:
                    outcome.doctor = [said for said in outcome.doctor if said not in known[outcome.pool]]
                    print(
                        f"{outcome.way}, {outcome.pool}: {_measured(outcome)}; {outcome.said}",
                        file=sys.stderr,
                        flush=True,
                    )
                outcomes += found
                if save is not None:
                    _save(save, found)
    return outcomes


async def _one(way: Way, fleet: IllFleet) -> list[Outcome]:
    fleet.sent.clear()
    for listed in fleet.listed.values():
        listed.clear()
    async with fleet.sessions():
        await asyncio.sleep(CALM_S)
        begun = time.monotonic()
        async with way.illness(fleet):
            ill = time.monotonic()  # a way may begin with a restart
            await asyncio.sleep(ill + way.ill_s / 2 - time.monotonic())
            half, before = time.monotonic(), {model: fleet.requests_at(model) for model in ENGINES}
            await asyncio.sleep(ill + way.ill_s - DOCTOR_BEFORE_S - time.monotonic())
            said = {model: listed[-1] for model, listed in fleet.listed.items()}
            doctor, status = await fleet.doctor()
            await asyncio.sleep(ill + way.ill_s - time.monotonic())
            last, reached = time.monotonic(), {model: fleet.requests_at(model) for model in ENGINES}
        ended = time.monotonic()
        outcomes = [Outcome(way.name, model, ended - begun) for model in ENGINES]
        while time.monotonic() < ended + BACK_S:
            await asyncio.sleep(POLL_S)
            for outcome in outcomes:
                _see(outcome, fleet, begun, last, ended)
            back = all(outcome.out_s is None or outcome.back_s is not None for outcome in outcomes)
            if back and time.monotonic() > ended + AFTER_S:
                break
        until = time.monotonic()
        # Under way: an engine that is out is tried again only with requests.
        try:
            await fleet.settled()
        except AssertionError:
            for outcome in outcomes:
                outcome.late = True
            await fleet.restart_services()
            await fleet.settled()
    for outcome in outcomes:
        outcome.count([sent for sent in fleet.sent if sent.at < until])
        # Each request at the proxy counts: a retry of a request that another engine answered, too.
        of_half = sum(sent.pool == outcome.pool and half <= sent.at < last for sent in fleet.sent)
        outcome.share = min((reached[outcome.pool] - before[outcome.pool]) / max(of_half, 1), 1.0)
        outs = [listed for listed in fleet.listed[outcome.pool] if begun <= listed.at < last and listed.out]
        now = said[outcome.pool]
        outcome.said = fleet.plain(
            ", then ".join(dict.fromkeys(listed.words for listed in [*([] if now.out else outs[:1]), now]))
        )
        outcome.doctor, outcome.doctor_status = doctor[outcome.pool], status
    return outcomes


def _see(outcome: Outcome, fleet: IllFleet, begun: float, last: float, ended: float) -> None:
    """Fill in when the engine was out, before the illness began to end at `last`, and back: the router lists it as in, and it has
    answered."""
    outs = [listed.at for listed in fleet.listed[outcome.pool] if begun <= listed.at < last and listed.out]
    if not outs:
        return
    outcome.out_s = outs[0] - begun
    ins = [listed.at for listed in fleet.listed[outcome.pool] if listed.at >= ended and not listed.out]
    name = fleet.ids[outcome.pool]
    answers = [sent.ended for sent in fleet.sent if sent.ok and sent.instance == name and sent.ended >= ended]
    if ins and answers:
        outcome.back_s = max(min(ins), min(answers)) - ended


# ---- what is shown ----


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _lost(outcome: Outcome) -> str:
    return f"{outcome.failed} + {outcome.refused} of {outcome.requests}"


def _times(outcome: Outcome) -> str:
    if outcome.out_s is None:
        return "stays in"
    return f"{outcome.out_s:.1f}, {'not' if outcome.back_s is None else _seconds(outcome.back_s)}"


def _measured(outcome: Outcome) -> str:
    """Return everything that was measured as one line."""
    reasons = ", ".join(f"{count} {why}" for why, count in sorted(outcome.reasons.items()))
    return (
        f"{_lost(outcome)} ({reasons or 'none'}); out {_seconds(outcome.out_s)} s, back {_seconds(outcome.back_s)} s; "
        f"{outcome.share:.0%} reach it{'; fleet started anew' if outcome.late else ''}; doctor ({outcome.doctor_status}): "
        f"{' | '.join(outcome.doctor) or 'nothing'}"
    )


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with a row for each way and pool."""
    shown = Table("way", "pool", "failed + refused", "out, back s", "share", "console", "doctor", box=None)
    for outcome in outcomes:
        shown.add_row(
            outcome.way,
            outcome.pool,
            _lost(outcome),
            _times(outcome),
            f"{outcome.share:.0%}",
            outcome.said,
            " | ".join(outcome.doctor),
        )
    return shown


def _cell(text: str) -> str:
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= CELL else f"{text[: CELL - 4].rsplit(' ', 1)[0]} ..."


def _row(*cells: str) -> str:
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _sum(outcomes: Sequence[Outcome]) -> str:
    """Return what was lost in pools of three, all ways together."""
    threes = [outcome for outcome in outcomes if outcome.pool == THREES]
    lost = [outcome.failed + outcome.refused for outcome in threes]
    requests = sum(outcome.requests for outcome in threes)
    return f"{sum(lost)} of {requests:,} requests lost, none in {lost.count(0)} of {len(lost)} ways"


def page(outcomes: Sequence[Outcome], before: Sequence[Outcome] = ()) -> str:
    """Return docs/ill_engines.md. `before`: the same ways at an older version."""
    by_way: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_way.setdefault(outcome.way, {})[outcome.pool] = outcome
    older = {(outcome.way, outcome.pool): outcome for outcome in before}
    text = INTRODUCTION + "\n"
    if before:
        text += f"An ill engine of three: {_sum(outcomes)}; with 0.2.0 {_sum(before)}.\n\n"
    text += _row(*_HEAD) + _row(*["---"] * len(_HEAD)).replace(" ", "")
    for way, pools in by_way.items():
        cells = [way]
        for pool in ENGINES:
            now, then = pools[pool], older.get((way, pool))
            cells += [_lost(now), _times(now), "-" if then is None else f"{_lost(then)}; {_times(then)}"]
        cells.insert(6, f"{pools['threes'].share:.0%}")
        text += _row(*cells)
    text += SAID + "\n" + _row("way", "console", "doctor") + "|---|---|---|\n"
    for way, pools in by_way.items():
        words = dict.fromkeys([pools[pool].said for pool in ("threes", "alone")])
        found = dict.fromkeys(said for pool in ("threes", "alone") for said in pools[pool].doctor)
        text += _row(way, " / ".join(words), "; ".join(found) or "nothing")
    return text


_HEAD = (
    *("way", "alone: failed + refused", "out, back s", "0.2.0"),
    *("one of three: failed + refused", "out, back s", "share", "0.2.0"),
)
INTRODUCTION = """\
# Ill engines

What happens while an engine is ill, in each of many ways. Made by `python -m bench.ill_engines`, on two cores of a shared
machine: emulated engines, of which one alone in its pool and one of a pool of three fall ill at the same time; router, gateway
and agents as processes. Four and six clients talk in sessions of six turns, every other answer streamed; every other client
leaves after 5 s without its whole answer. An illness lasts 8 s (16 s where nothing is answered, or the agent is away).

- **failed + refused**: requests without a whole answer, and those that the gateway refused since no instance could take them
  (503, which a client may repeat), of all that were sent from 2 s before the illness until the engine was back.
- **out, back**: seconds from the beginning of the illness until the router listed the engine as out, or not READY, and from its
  end (a restarted engine answers again) until it was in and had answered. What is not READY may get requests.
- **alone**: where no engine is well, requests are placed on the ill one all the same, unless it sleeps or answers nothing: they
  may fail where 0.2.0 refused them. One that answers nothing gets one request at a time.
- **share**: of the requests in the second half of the illness, those that reached the ill engine; one at a time are tried there.
- **0.2.0**: the same, with agent, router and gateway of version 0.2.0.
"""
SAID = """
What the console (and `pointsman instances`) showed of the ill engine, and what `pointsman doctor` warned of meanwhile; addresses
are replaced by ENGINE. Doctor asks each engine itself, too.
"""


def saved(file: Path) -> list[Outcome]:
    """Return the outcomes that `--save` has written."""
    return [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]


def _save(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Write outcomes in the order of WAYS. Those of ways that were not run this time are kept."""
    old = saved(file) if file.exists() else []
    rows = {(outcome.way, outcome.pool): asdict(outcome) for outcome in (*old, *outcomes)}
    names = [(way.name, pool) for way in WAYS for pool in ENGINES]
    file.write_text("".join(f"{json.dumps(rows[name])}\n" for name in names if name in rows))


def main() -> None:
    """Run ways, or write the page."""
    parser = argparse.ArgumentParser(
        "python -m bench.ill_engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], help="a part of a way's name; may be repeated")
    parser.add_argument("--services-python", default=sys.executable, help="Python of agent, router, gateway and doctor")
    parser.add_argument("--services-module", default="pointsman_cli.main", help="module of their command line")
    parser.add_argument("--save", type=Path, help="file for the results (JSON lines); its other ways are kept")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name} from the saved results in docs/results")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page(saved(RESULTS), saved(OLD_RESULTS)))
        return
    configure_logs("bench", "error")
    ways = [way for way in WAYS if not given.only or any(word in way.name for word in given.only)]
    outcomes = asyncio.run(run(ways, Services(given.services_python, given.services_module), given.save))
    Console(width=200).print(table(outcomes))


if __name__ == "__main__":
    main()
