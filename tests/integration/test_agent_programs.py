"""What agents' programs themselves do where something is wrong: through the gateway the same as without it.

tests/data/agent_programs.json has the whole table, which `python -m tests.support.clients.agent_cases` makes in some minutes.
Here the programs are run through the gateway; those that start slowly in a part of the cases.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.clients.agent_cases import AS_IT_COMES, CASES, FULL, TABLE, Try, tried
from tests.support.clients.agent_programs import CLAUDE, CLINE, CODEX, CONTINUE, OPENCODE, PROGRAMS

pytestmark = pytest.mark.timeout(400)

PARTS = {
    CLAUDE: tuple(CASES),
    CODEX: tuple(CASES),
    OPENCODE: tuple(CASES),
    CLINE: ("short", "broken"),
    CONTINUE: ("full", "outage", "broken"),
}
CELLS = {entry["program"]: entry["cases"] for entry in json.loads(TABLE.read_text())["programs"]}


def test_the_table_is_of_the_installed_programs() -> None:
    versions = {entry["program"]: entry["version"] for entry in json.loads(TABLE.read_text())["programs"]}
    assert versions == {program.name: program.version for program in PROGRAMS}


@pytest.mark.parametrize("program", CELLS)
def test_programs_do_through_the_gateway_what_they_do_without_it(program: str) -> None:
    for case, did in CELLS[program].items():
        here = did["gateway"]
        there = {did[place] for place in did if place != "gateway"}
        if case in FULL:
            assert here == "knows", case
        elif (program, case) != AS_IT_COMES:
            assert here in there, case


async def test_programs_do_what_the_table_says(tmp_path: Path) -> None:
    tries = [Try(program, case, "gateway") for program, cases in PARTS.items() for case in cases]
    found, ends = await tried(tmp_path, tries)
    differing = {key: did for key, did in found.items() if did != CELLS[key[0]][key[1]]["gateway"]}
    assert not differing, {
        attempt: ends[attempt] for attempt in tries if (attempt.program.name, attempt.case, "gateway") in differing
    }
    assert len(found) == len(tries)
