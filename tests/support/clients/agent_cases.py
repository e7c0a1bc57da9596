"""What agents' programs do where something is wrong: without a gateway, and through one.

    .venv/bin/python -m tests.support.clients.agent_cases

runs every program in every case and writes the table tests/data/agent_programs.json. A program

- `answers`: it ends with the answer;
- `knows`: it says that the context is full, in words of its own;
- `asks again`: it sends the request again (it is stopped then);
- `gives up`: it ends with an error.

Without a gateway: at vLLM where vLLM has the case, and at the API's provider (OpenAI, Anthropic) where the provider has it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pointsman.router.v1 import placement_pb2
from tests.support.clients.agent_programs import OPENCODE, PROGRAMS, Ended, Program, Server, opencode_server, run
from tests.support.clients.servers import EngineByPrompt, Provider, prompt_of, providers, stack_by_prompt
from tests.support.fakes.gateway_peers import MODEL, Stack
from tests.support.repository import REPOSITORY

TABLE = REPOSITORY / "tests/data/agent_programs.json"
# Case -> where else than at a gateway it is tried.
CASES = {
    "well": ("vllm",),
    "full": ("vllm", "provider"),
    "short": (),  # full, as the gateway itself finds it
    "busy": ("provider",),
    "outage": ("provider",),
    "error": ("vllm", "provider"),
    "bad": ("vllm", "provider"),
    "cut": ("vllm",),  # the connection breaks after the first word
    "broken": ("vllm",),  # it breaks before that
    "told": ("vllm",),  # the engine says in the stream, before the first word, that it has failed
}
FULL = ("full", "short")
# Whoever has the first word of an answer that breaks off need not ask again. cline does not, unless its connection breaks before
# it has looked at the word: a matter of time.
AS_IT_COMES = ("cline", "cut")
SHORT = "tiny-short"  # a model with a context that no program's first prompt fits
AT_ONCE = 3  # programs
WITHIN_S = 120.0
Found = dict[tuple[str, str, str], str]  # by program, case and place


@dataclass(frozen=True)
class Try:
    """One run of a program. `place`: vllm, provider or gateway."""

    program: Program
    case: str
    place: str

    @property
    def name(self) -> str:
        """What its requests are known by."""
        return f"{self.case}-{PROGRAMS.index(self.program)}{self.place}"


def all_tries() -> list[Try]:
    """Return every program in every case at every place."""
    return [
        Try(program, case, place)
        for program in PROGRAMS
        for case, elsewhere in CASES.items()
        for place in (*elsewhere, "gateway")
    ]


def _did(attempt: Try, ended: Ended, sent: int) -> str:
    if attempt.program.is_full(ended.printed):
        return "knows"
    if sent > 1:
        return "asks again"
    return "answers" if ended.status == 0 else "gives up"


class _Place:
    """Where the tries are sent, and how often each was."""

    def __init__(self, up: Stack, provider: Provider, usage: Path) -> None:
        self._up, self._provider, self._usage = up, provider, usage

    def server(self, attempt: Try) -> Server:
        urls = {"vllm": self._up.engines[0].url, "provider": self._provider.url, "gateway": self._up.url}
        return Server(urls[attempt.place], f"sk-{attempt.name}", SHORT if attempt.case == "short" else MODEL)

    def sent(self, attempt: Try) -> int:
        if attempt.place == "gateway":
            lines = self._usage.read_text().splitlines() if self._usage.exists() else []
            return sum(json.loads(line)["tenant"] == attempt.name for line in lines)
        asked = [self._provider.asked] + [e.asked for e in self._up.engines if isinstance(e, EngineByPrompt)]
        return sum(counts[attempt.name] for counts in asked)

    def enough(self, attempt: Try) -> Callable[[], bool]:
        """Return what tells whether a try has shown what it does: it was sent twice. Where the context is full, the second
        request may be for a summary."""
        return lambda: attempt.case not in FULL and self.sent(attempt) > 1


async def tried(folder: Path, tries: Iterable[Try]) -> tuple[Found, dict[Try, Ended]]:
    """Run programs; return what each did, and how it ended."""
    tries = list(tries)
    usage = folder / "usage"
    keys = "".join(f"{attempt.name}:sk-{attempt.name}\n" for attempt in tries if attempt.place == "gateway")
    turns = asyncio.Semaphore(AT_ONCE)
    ends: dict[Try, Ended] = {}
    async with (
        providers() as provider,
        stack_by_prompt(folder, keys, max_model_len=1_000_000, usage_file=usage) as up,
    ):
        (pool,) = up.router.pools
        short = placement_pb2.Pool()
        short.CopyFrom(pool)
        short.model, short.max_model_len = SHORT, 1_000
        short.instances[0].instance_id, short.instances[1].instance_id = "s0", "s1"
        del short.served_names[:], short.lora_names[:]
        up.router.pools.append(short)
        await up.router.tell_fleet()
        place = _Place(up, provider, usage)

        async def one_run(attempt: Try) -> None:
            async with turns:
                ends[attempt] = await run(
                    attempt.program,
                    folder / attempt.name,
                    place.server(attempt),
                    prompt_of(attempt.name),
                    within_s=WITHIN_S,
                    enough=place.enough(attempt),
                )

        async def sessions() -> None:
            """Run opencode's tries, in one process."""
            mine = [attempt for attempt in tries if attempt.program is OPENCODE]
            if not mine:
                return
            servers = {attempt.name: place.server(attempt) for attempt in mine}
            async with opencode_server(folder / "opencode", servers) as opencode, asyncio.timeout(WITHIN_S):

                async def session(attempt: Try) -> None:
                    model, prompt = servers[attempt.name].model, prompt_of(attempt.name)
                    ends[attempt] = await opencode.ask(attempt.name, model, prompt, enough=place.enough(attempt))

                await asyncio.gather(*map(session, mine))

        await asyncio.gather(sessions(), *(one_run(attempt) for attempt in tries if attempt.program is not OPENCODE))
        found = {
            (attempt.program.name, attempt.case, attempt.place): _did(attempt, ended, place.sent(attempt))
            for attempt, ended in ends.items()
        }
    return found, ends


def table(found: Found) -> dict[str, object]:
    """Return what was found as the content of TABLE."""
    programs = [
        {
            "program": program.name,
            "version": program.version,
            "cases": {
                case: {place: found[program.name, case, place] for place in (*elsewhere, "gateway")}
                for case, elsewhere in CASES.items()
            },
        }
        for program in PROGRAMS
    ]
    return {
        "about": "What agents' programs do where something is wrong: at vLLM, at the API's provider, and at a gateway. Made by "
        "tests/support/clients/agent_cases.py, which says what the words mean.",
        "programs": programs,
    }


def main() -> None:
    """Write TABLE, and print how each run ended."""
    with tempfile.TemporaryDirectory() as folder:
        found, ends = asyncio.run(tried(Path(folder), all_tries()))
    for attempt, ended in ends.items():
        print(f"{attempt.program.name}, {attempt.case} at {attempt.place}: {ended.status} {ended.printed[-600:]!r}")
    TABLE.write_text(json.dumps(table(found), indent=2) + "\n")


if __name__ == "__main__":
    main()
