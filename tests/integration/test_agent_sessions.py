"""Sessions of agents' programs that grow past the context: they see it, or know it before, have it summarised, and go on.

The program runs a script that prints much, then little. The model is an emulated engine: it calls the tool until the script has
nothing more to print, and writes the summary. A gateway stands before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_lab.emulator.emulated_engine import EmulateSettings, start
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR
from tests.support.clients.agent_programs import CLAUDE, CODEX, Program, Server, run
from tests.support.fakes.gateway_peers import Peers, fake_router, gateway_before, until_ready

pytestmark = pytest.mark.timeout(300)

MODEL = "pointsman-emulated"
TASK = "Run step.sh until nothing is left."
CONTEXT = 60_000
MUCH, BIG = (
    1_300,
    4,
)  # lines of a long output (under 30,000 characters: above, Claude Code keeps it in a file); number of them
STEP = f"""n=$(($(cat count 2>/dev/null || echo 0) + 1)); echo $n > count
if [ $n -gt {BIG} ]; then echo nothing more; exit; fi
i=0; while [ $i -lt {MUCH} ]; do echo "line $i of output $n"; i=$((i + 1)); done
"""
CALLS = 5  # in the history, after which the model is content
DONE = "All is done."


@dataclass(frozen=True)
class Session:
    """A program's tool for commands, its API, the context of its model, and how it tells in what it prints or keeps that it has
    compacted. `reported`: the context that it is told. `finds`: whether it sees the overflow itself."""

    program: Program
    tool: str
    arguments: dict[str, object]
    path: str
    context: int
    reported: int
    finds: bool
    compacted: Callable[[Path], bool]


def _claude_compacted(folder: Path) -> bool:
    return '"subtype":"compact_boundary"' in (folder / "printed").read_text()


def _codex_compacted(folder: Path) -> bool:
    return any('"type":"compacted"' in file.read_text() for file in (folder / "home/sessions").rglob("*.jsonl"))


SESSIONS = (
    # It is told a larger context than the model has, so that it meets the gateway's refusal, and only then compacts.
    Session(
        CLAUDE,
        "Bash",
        {"command": "sh ./step.sh", "description": "a step"},
        "/v1/messages",
        CONTEXT,
        1_000_000,
        True,
        _claude_compacted,
    ),
    # It compacts by the context that it is told, before that is full. After a refusal it ends its turn.
    Session(
        CODEX,
        "exec_command",
        {"cmd": "sh ./step.sh", "max_output_tokens": 20_000},
        "/v1/responses",
        40_000,
        40_000,
        False,
        _codex_compacted,
    ),
)


@pytest.mark.parametrize("session", SESSIONS, ids=[session.program.name for session in SESSIONS])
async def test_a_session_that_grows_past_the_context_is_compacted_and_goes_on(session: Session, tmp_path: Path) -> None:
    calls = [{"name": session.tool, "arguments": session.arguments}]
    script = [{"text": f"Step {number}.", "tool_calls": calls} for number in range(CALLS)]
    (tmp_path / "script.json").write_text(json.dumps([*script, {"text": DONE}]))
    folder = tmp_path / "program"
    (folder / "work").mkdir(parents=True)
    (folder / "work/step.sh").write_text(STEP)
    usage = tmp_path / "usage"
    keys = tmp_path / "keys"
    keys.write_text("agent:sk-agent\n")
    engine = await start(
        EmulateSettings(
            port=0, log_level="warning", speedup=100, max_model_len=session.context, script=tmp_path / "script.json"
        )
    )
    ref = placement_pb2.InstanceRef(instance_id="i0", url=engine.url, incarnation="1")
    pool = placement_pb2.Pool(
        model=MODEL, model_root=str(TOKENIZER_DIR), max_model_len=session.context, instances=[ref]
    )
    router = fake_router([pool])
    await router.start()
    try:
        async with gateway_before(Peers(router, []), usage_file=usage, api_keys_file=keys) as (gateway, url):
            await until_ready(gateway)
            server = Server(url, "sk-agent", MODEL, session.reported)
            ended = await run(session.program, folder, server, TASK, within_s=200, enough=lambda: False)
    finally:
        await router.stop()
        await engine.stop()
    assert ended.status == 0, ended.printed[-3_000:]
    assert DONE in ended.printed.splitlines()[-1] or DONE in ended.printed.splitlines()[-2]
    # The session went on where it was: all of the script's output was asked for, and more of it than the context holds.
    assert int((folder / "work/count").read_text()) > BIG
    assert session.compacted(folder)
    lines = [json.loads(line) for line in usage.read_text().splitlines()]
    assert {line["api"] for line in lines} == {session.path}
    refused = [line for line in lines if line["status"] == 400]
    answered = [line for line in lines if line["status"] == 200]
    assert len(refused) + len(answered) == len(lines)
    assert bool(refused) == session.finds
    sizes = [line["prompt_tokens"] for line in answered]
    assert min(after - before for before, after in pairwise(sizes)) < 0, "a prompt got shorter"
