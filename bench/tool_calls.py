"""Writes docs/tool_calls.md: whether agents get the same tool calls through the gateway as from the engine itself.

`python -m bench.tool_calls [--engine emulated|vllm] [CALLS [SEED]]`: without --engine of both kinds of engines, by default 2,000
calls of each. vLLM needs `make env-engine`. Agent loops by the clients of OpenAI and Anthropic ask an engine and a gateway the
same at the same time. Exits with status 1 if a call was lost or changed, and not by the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import string
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anthropic
import openai

from bench.calling_clients import ANY, APIS, Api, Asked, Client, Messages, Schemas, Turn
from bench.judged_fleet import Judged, emulated, real
from tests.support.http_request import ask

PAGE = Path("docs/tool_calls.md")
INTRO = """# Tool calls with and without the gateway

Written by `python -m bench.tool_calls`; not by hand.

Agent loops, each turn of which is asked twice at the same time: of an engine directly, and of a gateway (`pointsman up`: with
router and agent). Each call's result goes into the next turn. Clients: openai {openai}, anthropic {anthropic}. A turn is the same
if names, arguments (byte by byte where the API sends them as text), their order, the text and the reason of the end are the same.
"""


@dataclass(frozen=True)
class Kind:
    """A kind of engines, and how agents ask it."""

    title: str  # of its section of the page
    about: str  # what the page says of it
    fleet: Callable[[int], AbstractAsyncContextManager[Judged]]  # of a seed
    asked: Callable[[random.Random, str], Asked]  # draws what a loop asks of a model
    choice: Callable[
        [random.Random, int, Sequence[str]], str
    ]  # draws a turn's tool choice, from its number and the tools
    turns: int  # of an agent loop
    at_once: int  # loops of each API at a time
    # Whether the engine itself is asked twice: its answers depend on what else it computes at the time.
    twice: bool


# ---- an emulated engine: scripted calls ----


def _text(rng: random.Random) -> str:
    alphabets = (
        string.ascii_letters + " ", string.printable, 'äöüßéñçøłž "', "日本語中文字한국어",
        "😀👩‍👩‍👧🇩🇪", "\u2028\u2029\u200b\ufeff\x7f\x01",
        '\\"/\b\f\n\r\t', "<tool_call></tool_call>{}[]",
    )  # fmt: skip
    return "".join(rng.choices(rng.choice(alphabets), k=rng.choice([0, 1, 5, 20, 20, 60, 400])))


def _value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(9 if depth < 4 else 6):
        case 0:
            return rng.choice([True, False, None])
        case 1:
            return rng.choice([0, -1, 2**53, -(2**63), rng.randrange(10**9)])
        case 2:
            return rng.choice([0.1, -1e-7, 1.5e300, rng.random()])
        case 3 | 4 | 5:
            return _text(rng)
        case 6:
            return [_value(rng, depth + 1) for _ in range(rng.randrange(5))]
        case _:
            return {_text(rng)[:40]: _value(rng, depth + 1) for _ in range(rng.randrange(5))}


def _script(rng: random.Random) -> list[dict[str, Any]]:
    """Return the scripted answers of one engine, one for each turn."""
    return [
        {
            "text": rng.choice(["", "I look at it. ", _text(rng)]),
            "tool_calls": [
                {
                    "name": rng.choice(NAMES),
                    "arguments": {_text(rng)[:20] or "a": _value(rng) for _ in range(rng.randrange(4))},
                }
                for _ in range(rng.randint(1, 4))
            ],
        }
        for _ in range(TURNS)
    ]


ENGINES, TURNS = 3, 10
SORTS = ["file", "Verzeichnis ä", "目录", 'a "quoted" one']
NAMES = ("read_file", "edit-file", "run", "mcp__tickets__search", "A" * 64)
SCHEMAS: Schemas = {
    name: {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 6},
            "kind": {"enum": SORTS},
            "options": {"type": "object", "properties": {"deep": {"type": "boolean"}, "ratio": {"type": "number"}}},
        },
        "required": ["path", "kind", "options"],
    }
    for name in NAMES
}


@asynccontextmanager
async def _emulated(seed: int) -> AsyncIterator[Judged]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps(_script(random.Random(seed))))
        async with emulated(ENGINES, "--script", str(script)) as judged:
            yield judged


# ---- vLLM: calls by a grammar ----


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_WORD = {"type": "string", "maxLength": 8}
_NODE = _object(name=_WORD, below={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1})
# Each string but one is bounded, so that a call ends before its limit of tokens.
GRAMMARS: Schemas = {
    "read_file": _object(
        path=_WORD,
        lines={
            "type": "array",
            "items": {"type": "integer", "minimum": -9, "maximum": 999},
            "minItems": 1,
            "maxItems": 4,
        },
    ),
    "edit-file": _object(
        path=_WORD,
        edits={
            "type": "array",
            "items": _object(old=_WORD, new=_WORD, every={"type": "boolean"}),
            "minItems": 1,
            "maxItems": 3,
        },
    ),
    "mcp__tickets__search": {
        "type": "object",
        "properties": {
            "kind": {"enum": SORTS},
            "options": {"type": "object", "properties": {"deep": {"type": "boolean"}, "ratio": {"type": "number"}}},
            "größe": {"type": "number"},
        },
        "required": ["kind"],
        "additionalProperties": False,
    },
    "A" * 24: _object(
        state={"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 6}, {"type": "integer"}, {"enum": SORTS}]},
        tags={"type": "array", "items": {"enum": ["α", "β/γ", "\\", "\n", "😀"]}, "maxItems": 5},
    ),
    "run": _object(command={"type": "string", "pattern": "^[a-z]{1,6}( -[a-z]){0,3}$"}),
    "tree": _object(root={"$ref": "#/$defs/node"}) | {"$defs": {"node": _NODE}},
    "now": _object(),
    "note": _object(text={"type": "string"}),
}
# The tools of a loop: some few sets, as of an agent's modes. Each is a prefix of prompts and a grammar of its own.
SETS: Sequence[Schemas] = [
    {name: GRAMMARS[name] for name in random.Random(number).sample([*GRAMMARS], 3)} for number in range(12)
]


def _real(_: int) -> AbstractAsyncContextManager[Judged]:
    return real(max_model_len=8_192, maker="calling_model.py")


def _real_asked(rng: random.Random, model: str) -> Asked:
    seed, parallel = rng.randrange(2**31), rng.random() < 0.75
    return Asked(model, rng.choice(SETS), max_tokens=160, strict=True, parallel=parallel, seed=seed)


# ---- the comparison ----

KINDS = {
    "emulated": Kind(
        title="An emulated engine",
        about=f"""\
Loops of {TURNS} turns; {ENGINES} engines behind the gateway. The answers are drawn: one to four calls at once, with a text before
them or none, arguments with nested values, all of JSON's escapes, text of many scripts, long strings and numbers; each fifth turn
names a tool, whose arguments the engine draws from its schema.
""",
        fleet=_emulated,
        asked=lambda _, model: Asked(model, SCHEMAS, max_tokens=3_000),
        choice=lambda rng, number, names: rng.choice(names) if number % 5 == 4 else "",
        turns=TURNS,
        at_once=2,
        twice=False,
    ),
    "vllm": Kind(
        title="vLLM",
        about="""\
Loops of 5 turns; vLLM {version}, a CPU engine with a small random model, which is also the one behind the gateway. Each turn
requires a call or names a tool, so that the engine decodes by the grammar of the tools' schemas: nested values, references,
enums, patterns, numbers, and texts of all scripts that the model chooses, greedily. A quarter of the loops allow one call at a
time. A loop ends early with arguments that are no JSON: those that are cut off at the limit of tokens, and some that vLLM
spoils itself.

**alone**: the same turns, asked of vLLM a second time at the same time. What differs there is vLLM's own doing: scores that are
almost equal may change places as other requests share the batch. **neither**: turns of which the answer through the gateway is
none of the two of vLLM.
""",
        fleet=_real,
        asked=_real_asked,
        choice=lambda rng, _, names: rng.choice([ANY, ANY, *names[:1]]),
        turns=5,
        at_once=4,
        twice=True,
    ),
}
TITLES = {
    "turns": "turns",
    "calls": "calls",
    "lost": "lost",
    "changed": "changed",
    "otherwise": "turns that differ otherwise",
}
WRONG = ("lost", "changed", "otherwise")


def differences(own: Turn, other: Turn) -> Counter[str]:
    """Return how many of an engine's calls another answer to the same turn lacks (`lost`) or has otherwise (`changed`), and
    whether it ends or reads `otherwise`."""
    added = max(len(other.calls) - len(own.calls), 0)
    return Counter(
        lost=max(len(own.calls) - len(other.calls), 0),
        changed=sum(a != b for a, b in zip(own.calls, other.calls, strict=False)) + added,
        otherwise=int(own[1:] != other[1:]),
    )


async def loop(kind: Kind, api: Api, urls: Sequence[str], model: str, name: str) -> Counter[str]:
    """Run an agent loop, drawn by its name; return what was counted. `urls`: the engine's, the gateway's, and the engine's again
    if it is asked twice."""
    rng = random.Random(name)
    asked = kind.asked(rng, model)
    sides = [api.at(url, asked) for url in urls]
    try:
        return await _turns(kind, sides, asked, rng, name)
    finally:
        await asyncio.gather(*(side.close() for side in sides))


async def _turns(kind: Kind, sides: Sequence[Client], asked: Asked, rng: random.Random, name: str) -> Counter[str]:
    found: Counter[str] = Counter()
    messages: Messages = [{"role": "user", "content": f"Task {name}: {rng.getrandbits(64):x}"}]
    for number in range(kind.turns):
        choice = kind.choice(rng, number, [*asked.schemas])
        try:
            own, through, *again = await asyncio.gather(*(side.ask(messages, choice) for side in sides))
        except (openai.APIError, anthropic.APIError) as error:
            raise RuntimeError(f"{name}, turn {number}: {error}") from error
        found.update(turns=1, calls=len(own.calls), neither=through not in (own, *again))
        found.update(differences(own, through))
        for other in again:
            found.update({f"alone {key}": count for key, count in differences(own, other).items()})
        if through != own:
            print(f"{name}, turn {number}:\n  {own}\n  {through}\n  {again}", file=sys.stderr)
        if not own.whole:
            break
        messages += sides[0].blocks(own, number)
    return found


async def compared(kind: Kind, calls: int, seed: int) -> tuple[dict[str, Counter[str]], str]:
    """Compare until each API has made its share of the calls. Return by API what was counted, and the engine's version."""
    found = {api.name: Counter[str]() for api in APIS}
    async with kind.fleet(seed) as judged:

        async def run(api: Api, numbers: Iterator[int]) -> None:
            """Run one loop after the other."""
            while found[api.name]["calls"] * len(APIS) < calls:
                urls = (judged.engine, judged.gateway, *([judged.engine] if kind.twice else []))
                name = f"{seed} {api.name} {next(numbers)}"
                found[api.name].update(await loop(kind, api, urls, judged.model, name))

        numbers = {api.name: itertools.count(1) for api in APIS}
        await asyncio.gather(*(run(api, numbers[api.name]) for api in APIS for _ in range(kind.at_once)))
        answer = await asyncio.to_thread(ask, f"{judged.engine}/version")
    return found, answer.json()["version"]


# ---- the page ----


def section(kind: Kind, found: Mapping[str, Counter[str]], engine_version: str) -> str:
    """Return what the page says of a kind of engines."""
    titles = TITLES
    if kind.twice:
        titles = titles | {"neither": "neither"} | {f"alone {key}": f"alone: {TITLES[key]}" for key in WRONG}
    rows = [
        [name, *(f"{counted[key]:,}" for key in titles)] for name, counted in (*found.items(), ("all", _total(found)))
    ]
    head, *lines = (f"| {' | '.join(row)} |\n" for row in (["API", *titles.values()], *rows))
    table = f"{head}|{'---|' * (len(titles) + 1)}\n{''.join(lines)}"
    return f"## {kind.title}\n\n{kind.about.format(version=engine_version)}\n{table}"


def page(sections: Mapping[str, str], before: str) -> str:
    """Return the page with these sections, by kind; those of other kinds are as they stand in the page `before`."""
    known = {part.partition("\n")[0]: f"## {part}" for part in before.split("\n## ")[1:]}
    all_sections = [sections.get(name) or known.get(kind.title) for name, kind in KINDS.items()]
    intro = INTRO.format(openai=version("openai"), anthropic=version("anthropic"))
    return "\n".join([intro, *filter(None, all_sections)])


def _total(found: Mapping[str, Counter[str]]) -> Counter[str]:
    return sum(found.values(), Counter[str]())


def main(names: Sequence[str], calls: int, seed: int) -> int:
    """Compare, write the page, and return the process's exit status."""
    sections, wrong = dict[str, str](), 0
    for name in names:
        kind = KINDS[name]
        found, engine_version = asyncio.run(compared(kind, calls, seed))
        sections[name] = section(kind, found, engine_version)
        print(sections[name])
        total = _total(found)
        wrong += total["neither"] if kind.twice else sum(total[key] for key in WRONG)
    PAGE.write_text(page(sections, PAGE.read_text()))
    return int(bool(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=KINDS, action="append")
    parser.add_argument("calls", type=int, nargs="?", default=2_000)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    words = parser.parse_args()
    sys.exit(main(words.engine or [*KINDS], words.calls, words.seed))
