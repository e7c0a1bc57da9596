"""`python -m studies.rival_rules`: compares the lab's readings of other routers' rules with their own programs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from pathlib import Path

from rich.console import Console

from bench import stack
from bench.figures import Figure, figure_table
from bench.rivals.environments import environment
from studies.rival_rules.http_states import Program, http_states
from tests.support.rival_choices import State, agrees, write_states

# Number of states of each program, and the seed of their draw.
STATES, SEED = 1_200, 1
# The programs that are asked over HTTP.
PROGRAMS: dict[str, Program] = {
    "sglang-router": lambda engines: stack.sglang_router(engines, "cache_aware"),
    "smg": lambda engines: stack.smg(engines, "cache_aware"),
}
# Timeout of Dynamo's states, s.
DYNAMO_S = 300.0


async def rival_rules() -> list[Figure]:
    """rule_*_share: the share of drawn states in which a program chooses an instance that is best by our reading of its rule.
    Stores the states for the unit tests. Installs the programs in the scoreboard's environments."""
    return [
        _figure("dynamo", await _dynamo_states()),
        *[_figure(rival, await http_states(rival, program, STATES, SEED)) for rival, program in PROGRAMS.items()],
    ]


def _figure(rival: str, states: list[State]) -> Figure:
    write_states(rival, states)
    share = sum(map(agrees, states)) / len(states)
    note = f"{len(states)} states"
    if apart := [state for state in states if state.get("shared_blocks") == 0]:
        note += f"; {sum(map(agrees, apart)) / len(apart):.3f} of {len(apart)} in which open requests share no blocks"
    return Figure(f"rule_{rival.replace('-', '_')}_share", share, "", 1.0, f"{note}; baseline is the goal")


async def _dynamo_states() -> list[State]:
    python = await asyncio.to_thread(environment, "dynamo") / "python"
    script = Path(__file__).with_name("dynamo_states.py")
    child = await asyncio.create_subprocess_exec(
        python, script, str(STATES), str(SEED), stdout=asyncio.subprocess.PIPE,
        # Block hashes are hashes of Python's; DYN_LOG: its own lines go to stdout.
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": "", "DYN_LOG": "error"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(DYNAMO_S):
            output, _ = await child.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    if child.returncode:
        raise RuntimeError(f"{script.name} ended with {child.returncode}")
    return [json.loads(line) for line in output.splitlines()]


if __name__ == "__main__":
    argparse.ArgumentParser("python -m studies.rival_rules", description=__doc__).parse_args()
    Console(width=180).print(figure_table(asyncio.run(rival_rules())))
