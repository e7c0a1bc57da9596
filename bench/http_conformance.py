"""Writes docs/http_conformance.md: how gateway and nginx handle HTTP/1.1 requests of third-party test sets.

`python -m bench.http_conformance` (needs Debian's nginx). Both run in front of mock engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from itertools import groupby
from pathlib import Path

from bench import stack
from bench.gateway import fleet
from tests.support.http_cases import FILE, HttpCase, Outcome, ask, fault, load

COLUMNS = ("case", "wanted", "gateway", "nginx", "RFC", "from")
PAGE = Path("docs/http_conformance.md")
# Timeout of a case, s. nginx continues to read a refused request for 5 s.
WITHIN_S = 8.0
# Maximum number of concurrent cases.
AT_ONCE = 10
WANTS = {
    "accept": "2xx",
    "close": "2xx, then closed",
    "refuse": "an error, then closed",
    "error": "an error",
    "either": "2xx or an error",
    "cut": "no 2xx",
}
INTRO = """# HTTP/1.1 conformance

Written by `python -m bench.http_conformance`; not by hand.

{count} requests of outside sets, sent to the gateway and to nginx {nginx} (one worker, `proxy_pass` to the same mock engines),
and what came back. The requests are data: [cases.toml](../{file}), with the set, the licence and the RFC
section that each is from. `tests/integration/test_gateway_http_cases.py` sends them to a gateway process at each test run.

A refusal closes the connection wherever what follows could be read in two ways. `closed`: the connection
ended, with or without an answer before; otherwise it took the next request, and `then` is that one's status where it is no 2xx.
`silence`: neither an answer nor the end within {within:.0f} s. **Bold** is not what is wanted. Where an RFC lets a server
choose between a refusal and a repair, and the repair has been used to smuggle requests, the refusal is wanted here: a bold cell
is no proof of a violation.

| | as wanted | not |
|---|---|---|
| gateway | {ours} | {not_ours} |
| nginx | {theirs} | {not_theirs} |
"""


async def outcomes(port: int, cases: list[HttpCase]) -> list[Outcome]:
    """Send all cases to the server at `port`; return its outcomes."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(case: HttpCase) -> Outcome:
        async with room:
            return await ask(port, case, WITHIN_S)

    return await asyncio.gather(*map(one, cases))


async def run() -> tuple[list[HttpCase], list[Outcome], list[Outcome]]:
    """Return the cases, and the outcomes of gateway and nginx."""
    cases = load(stack.MODEL)
    async with contextlib.AsyncExitStack() as running:
        engines, model = await running.enter_async_context(fleet(0.0))
        gateway, _ = await running.enter_async_context(stack.pointsman(engines, model))
        nginx = await running.enter_async_context(stack.nginx(engines))
        return cases, await outcomes(gateway.port, cases), await outcomes(nginx.port, cases)


def page(cases: list[HttpCase], ours: list[Outcome], theirs: list[Outcome], nginx: str) -> str:
    """Return the page's text."""
    wrong = [sum(bool(fault(*pair)) for pair in zip(cases, seen, strict=True)) for seen in (ours, theirs)]
    parts = [
        INTRO.format(
            count=len(cases),
            nginx=nginx,
            file=FILE.relative_to(Path.cwd()),
            within=WITHIN_S,
            ours=len(cases) - wrong[0],
            not_ours=wrong[0],
            theirs=len(cases) - wrong[1],
            not_theirs=wrong[1],
        )
    ]
    for group, rows in groupby(zip(cases, ours, theirs, strict=True), key=lambda row: row[0].group):
        parts.append(
            f"\n## {group.replace('-', ' ').capitalize()}\n\n{_row(*COLUMNS)}{_row(*('---' for _ in COLUMNS))}"
        )
        for case, our, their in rows:
            cells = (_cell(case, seen) for seen in (our, their))
            parts.append(_row(case.id, WANTS[case.want], *cells, case.rfc, case.source))
    return "".join(parts)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(case: HttpCase, seen: Outcome) -> str:
    return f"**{seen}** ({wrong})" if (wrong := fault(case, seen)) else str(seen)


def main() -> None:
    """Run all cases, and write the page."""
    version = subprocess.run(["/usr/sbin/nginx", "-v"], check=True, capture_output=True, text=True).stderr
    found = re.search(r"nginx/([0-9.]+)", version)
    PAGE.write_text(page(*asyncio.run(run()), found[1] if found else ""), encoding="utf-8")


if __name__ == "__main__":
    main()
