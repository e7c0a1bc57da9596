"""Writes docs/compliance.md: what the Open Responses compliance suite, and llm-comply's cases of three APIs, say of engines, and
of a gateway in front of them.

`python -m bench.compliance` (needs `make env-judges env-engine`, and the suite's sources in .state: it says how). Exits with
status 1 if a case passes at an engine and not through the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.judged_fleet import JUDGES, emulated, real
from pointsman_lab.report.bundle import git_commit
from tests.support.repository import REPOSITORY

PAGE = Path("docs/compliance.md")
ENGINES = 2
# The Open Responses compliance suite's own program: no registry has it.
OWN_SUITE = REPOSITORY / ".state/open_responses"
OWN_SOURCE, OWN_COMMIT = "https://github.com/openresponses/openresponses", "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c"
BUN = JUDGES.parent / "node_modules/@oven/bun-linux-x64/bin/bun"
FORMATS = {
    "own": "Open Responses, the suite's own program",
    "open-responses": "Open Responses",
    "openai-chat": "OpenAI chat completions",
    "anthropic": "Anthropic messages",
}
SIDES = ("emulated", "emulated, through", "vLLM", "vLLM, through")
WITHIN_S = 120
# The suites set no limit of tokens, and want answers that end by themselves. The model does not, unless one of these ids ends it.
ENDS = json.dumps({"eos_token_id": list(range(256, 1_024, 8))})
CONTEXT = 1_024
INTRO = """# Compliance suites

Written by `python -m bench.compliance`; not by hand.

The [Open Responses]({source}) compliance suite (commit {commit:.10}) by its own program,
and the cases of [llm-comply](https://github.com/Oaklight/llm-comply) {version}, which has those of that suite with its document,
and such cases for two more APIs. Each is sent to an emulated engine, to a gateway in front of
{engines} of them, to vLLM (a CPU engine with a small random model) and to a gateway in front of that. `pass`: the answer, its
events and their order are as the suite wants them. `skipped`: the suite has this case for other models only. **Bold**: passes
at the engine and not through the gateway.

The gateway does not change answers, so what vLLM's lack in fields the gateway's lack too: nearly all failures are fields that
vLLM leaves out, or writes as null where the document wants another type. The others:

- Image Input: neither the small model nor the emulated engine sees images; both answer 400.
- Compaction: vLLM has no `/v1/responses/compact`, and answers 405, where the suite allows 404.
- Error Handling: a request without `model` is answered by vLLM with its one model, and refused by the gateway, as wanted.

| suite | {sides} |
|---|{rules}|
"""


class Outcome(NamedTuple):
    """What the suite says of a case: "passed", "failed" or "skipped", and why."""

    status: str
    errors: tuple[str, ...]


async def outcomes(url: str, model: str, suite: str) -> dict[str, Outcome]:
    """Run a suite against a server; return the outcomes by the case's name."""
    if suite == "own":
        program = [BUN, "run", OWN_SUITE / "bin/compliance-test.ts"]
    else:
        program = [JUDGES / "llm-comply", "--format", suite, "--timeout", str(WITHIN_S)]
    if suite == "anthropic":
        program += ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"]
    words = map(str, (*program, "--base-url", f"{url}/v1", "--model", model, "--json", "--api-key", "none"))
    environment = os.environ | {"NODE_PATH": str(JUDGES.parent / "node_modules")}
    child = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE, env=environment)
    out, _ = await child.communicate()
    results: list[dict[str, Any]] = json.loads(out)["results"]
    return {each["name"]: Outcome(each["status"], tuple(map(_general, each.get("errors", ())))) for each in results}


def _general(error: str) -> str:
    """Return an error without the ids and texts of one run."""
    error = re.sub(r"(resp|msg|chatcmpl|fc|call|rs)_?-?[0-9a-f]{8,}", "ID", error)
    error = re.sub(r"\{.*\}|\[\{.*\]", "{...}", error)
    error = error.replace("|", "/").replace("`", "'")
    return error if len(error) < 160 else f"{error[:157]}..."


def page(found: Mapping[str, Sequence[Mapping[str, Outcome]]], version: str) -> str:
    """Return the page's text. `found`: by suite the outcomes of each side, in the order of SIDES."""
    intro = INTRO.format(
        source=OWN_SOURCE,
        commit=OWN_COMMIT,
        version=version,
        engines=ENGINES,
        sides=" | ".join(SIDES),
        rules="|".join(["---"] * len(SIDES)),
    )
    parts = [intro]
    for suite, sides in found.items():
        counts = [f"{sum(o.status == 'passed' for o in side.values())} of {len(side)}" for side in sides]
        parts.append(f"| {FORMATS[suite]} | {' | '.join(counts)} |\n")
    for suite, sides in found.items():
        parts.append(f"\n## {FORMATS[suite]}\n\n| case | {' | '.join(SIDES)} |\n|---|{'---|' * len(SIDES)}\n")
        for name in sides[0]:
            cells = []
            for at, side in enumerate(sides):
                word = {"passed": "pass", "failed": "fail"}.get(side[name].status, side[name].status)
                lost = at % 2 and side[name].status == "failed" and sides[at - 1][name].status == "passed"
                cells.append(f"**{word}**" if lost else word)
            parts.append(f"| {name} | {' | '.join(cells)} |\n")
        parts.append(f"\n| why it fails | {' | '.join(SIDES)} |\n|---|{'---|' * len(SIDES)}\n")
        for error, seen in _reasons(sides).items():
            parts.append(f"| `{error}` | {' | '.join(map(str, seen))} |\n")
    return "".join(parts)


def _reasons(sides: Sequence[Mapping[str, Outcome]]) -> dict[str, list[int]]:
    """Return by error the number of cases that fail for it, by side."""
    counts = [
        Counter(
            error for outcome in side.values() if outcome.status == "failed" for error in dict.fromkeys(outcome.errors)
        )
        for side in sides
    ]
    return {
        error: [seen[error] for seen in counts] for error in dict.fromkeys(error for seen in counts for error in seen)
    }


def worse(found: Mapping[str, Sequence[Mapping[str, Outcome]]]) -> list[str]:
    """Return the cases that pass at an engine and not through the gateway in front of it."""
    return [
        f"{FORMATS[suite]}, {name}, {SIDES[at]}: {through[name].errors}"
        for suite, sides in found.items()
        for at, (own, through) in ((at, sides[at - 1 : at + 1]) for at in (1, 3))
        for name in own
        if own[name].status == "passed" and through[name].status == "failed"
    ]


async def judged() -> dict[str, list[dict[str, Outcome]]]:
    """Run all suites; return by suite the outcomes of each side."""
    found: dict[str, list[dict[str, Outcome]]] = {suite: [] for suite in FORMATS}
    for fleet in (emulated(ENGINES), real("--override-generation-config", ENDS, max_model_len=CONTEXT)):
        async with fleet as one:
            for suite, sides in found.items():
                sides += [await outcomes(url, one.model, suite) for url in (one.engine, one.gateway)]
    return found


def main() -> int:
    """Run, write the page, and return the process's exit status."""
    if (commit := git_commit(OWN_SUITE)) != OWN_COMMIT:
        folder = OWN_SUITE.relative_to(REPOSITORY)
        clone = f"git clone {OWN_SOURCE} {folder} && git -C {folder} checkout {OWN_COMMIT}"
        sys.exit(
            f"{folder} has not the Open Responses suite's commit {OWN_COMMIT} (but {commit or 'nothing'}): {clone}"
        )
    found = asyncio.run(judged())
    [metadata] = JUDGES.parent.glob("lib/python*/site-packages/llm_comply-*.dist-info")
    PAGE.write_text(page(found, metadata.name.removeprefix("llm_comply-").removesuffix(".dist-info")))
    print(PAGE.read_text())
    for line in (lost := worse(found)):
        print(f"worse through the gateway: {line}", file=sys.stderr)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
