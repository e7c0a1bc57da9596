"""Clients and agents that know a full context recognise it through the gateway, also those that do not know vLLM's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clients.agent_programs import CLAUDE, CODEX, CONTINUE, Program, Server, run
from tests.support.clients.programs import Case, asked
from tests.support.engines.chat_client import fresh_words
from tests.support.engines.servers import Engine
from tests.support.processes.control_plane import ControlPlane

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FULL = {
    "ContextWindowExceededError",  # litellm
    "OpenAIContextOverflowError",  # langchain
    "AnthropicContextOverflowError",
    "overflow",  # pi
}
# The others have no word of their own for it: they know a bad request, which they do not send again.
KNOW_NONE = {
    "openai chat",
    "openai responses",
    "anthropic",
    "openai node",
    "anthropic node",
    "ai openai-compatible",
    "ai anthropic",
}
GIVES_UP = {"BadRequestError", "APICallError, final"}


async def test_a_full_context_is_recognised(plane: ControlPlane, engines: list[Engine]) -> None:
    prompt = fresh_words(6_000)
    found = await asked(
        [
            Case(f"{at} {stream}", url, model="tiny", prompt=prompt, stream=stream)
            for at, url in (("there", engines[0].url), ("here", plane.gateway_url))
            for stream in (False, True)
        ]
    )
    through = {(client, case): saw for (client, case), saw in found.items() if case.startswith("here")}
    missed = {key: saw for key, saw in through.items() if saw not in (GIVES_UP if key[0] in KNOW_NONE else FULL)}
    assert not missed, found
    direct = {client for (client, case), saw in found.items() if saw in FULL and case.startswith("there")}
    assert direct, found
    assert len(through) == 28


# opencode and cline start slowly: tests/integration/test_agent_programs.py has them. What the programs do at vLLM itself is in
# tests/data/agent_programs.json; here they ask for more output than this model's whole context, which vLLM says first.
@pytest.mark.parametrize("program", [CLAUDE, CODEX, CONTINUE], ids=lambda program: program.name)
async def test_a_program_whose_first_prompt_fills_the_context_says_so(
    plane: ControlPlane, program: Program, tmp_path: Path
) -> None:
    server = Server(plane.gateway_url, "sk-none", "tiny")
    ended = await run(program, tmp_path / "program", server, "Hello.", within_s=100, enough=lambda: False)
    assert program.is_full(ended.printed), ended.printed[-2_000:]
    assert ended.status
