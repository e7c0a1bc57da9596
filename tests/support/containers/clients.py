"""Clients that run in the engine's network: `python -m tests.support.containers.clients KIND URL KEY MODEL`, which prints JSON.

KIND `vendors`: the official clients of OpenAI and Anthropic ask for an answer and a stream each. KIND `load`: CLIENTS at a time
ask for streams until stdin ends, and count what becomes of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import aiohttp

from tests.support.containers.docker_host import DockerHost
from tests.support.repository import REPOSITORY
from tests.support.waiting import until

EMULATED = "pointsman-emulated"
CLIENTS = 4
# Tokens of a stream of the load: some seconds of an emulated engine.
TOKENS = 150
# No stream takes as long, s.
DEADLINE_S = 60.0
WORDS = ("north", "south", "east", "west", "train", "river", "bridge", "tunnel", "signal", "station", "switch", "track")


@dataclass
class Load:
    """Streams that clients asked for. `refused`: no connection, or one that ended without an answer; `put_off`: a status with
    Retry-After. After both, clients ask again. `failed`: what else became of streams that are not whole."""

    _process: subprocess.Popen[str] = field(repr=False)
    _told: IO[str] = field(repr=False)
    whole: int = 0
    refused: int = 0
    put_off: int = 0
    failed: list[str] = field(default_factory=list)
    longest_refusal_s: float = 0.0

    def answers(self, count: int) -> None:
        """Wait until `count` more streams are whole."""
        self._read()
        wanted = self.whole + count
        until(lambda: self._read() >= wanted, within_s=120, what=f"{count} more streams, {self}")

    def end(self) -> None:
        """Let the open streams end, and ask for no more."""
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.wait() == 0
        self._read()

    def _read(self) -> int:
        # Clients write at this file's position, so it must stay.
        told = os.pread(self._told.fileno(), os.fstat(self._told.fileno()).st_size, 0)
        # The last line may not be whole yet.
        if lines := told.split(b"\n")[:-1]:
            for name, value in json.loads(lines[-1]).items():
                setattr(self, name, value)
        return self.whole


@contextmanager
def load(host: DockerHost, url: str, key: str, model: str = EMULATED, **env: str) -> Iterator[Load]:
    """Keep CLIENTS streams open; the block's end waits for their ends."""
    with tempfile.TemporaryFile("w+") as output, _client(host, ("load", url, key, model), env, output) as process:
        running = Load(process, output)
        try:
            yield running
            running.end()
        finally:
            process.kill()


def vendors(host: DockerHost, url: str, key: str, model: str = EMULATED, **env: str) -> dict[str, Any]:
    """Return what the official clients made of their answers: text and end of each."""
    with _client(host, ("vendors", url, key, model), env, subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, out
        found: dict[str, Any] = json.loads(out)
        return found


def _client(
    host: DockerHost, words: tuple[str, ...], env: dict[str, str], output: IO[str] | int
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        host.client(sys.executable, "-m", __name__, *words),
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | env,
        stdin=subprocess.PIPE,
        stdout=output,
        text=True,
    )


def _ask_vendors(url: str, key: str, model: str) -> dict[str, Any]:
    import anthropic
    import openai

    question: Any = [{"role": "user", "content": "Which way does the train go?"}]
    answers: dict[str, Any] = {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        chat = client.chat.completions.create(model=model, messages=question, max_tokens=8)
        answers["openai"] = [chat.choices[0].message.content, chat.choices[0].finish_reason]
        parts = list(client.chat.completions.create(model=model, messages=question, max_tokens=8, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        answers["openai stream"] = [text, parts[-1].choices[0].finish_reason]
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        message: Any = client.messages.create(model=model, messages=question, max_tokens=8)
        answers["anthropic"] = [message.content[0].text, message.stop_reason]
        with client.messages.stream(model=model, messages=question, max_tokens=8) as stream:
            text = "".join(stream.text_stream)
            answers["anthropic stream"] = [text, stream.get_final_message().stop_reason]
    return answers


async def _load(url: str, key: str, model: str) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    reading = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reading), sys.stdin)
    numbers = itertools.count()
    counts: dict[str, Any] = {"whole": 0, "refused": 0, "put_off": 0, "failed": [], "longest_refusal_s": 0.0}

    async def client(http: aiohttp.ClientSession) -> None:
        refused_at = 0.0
        number = next(numbers)
        while not ended.is_set():
            outcome = await _stream(http, url, model, number)
            if outcome in ("refused", "put_off"):
                counts[outcome] += 1
                refused_at = refused_at or time.monotonic()
                await asyncio.sleep(0.2)
                continue
            if refused_at:
                counts["longest_refusal_s"] = max(counts["longest_refusal_s"], time.monotonic() - refused_at)
                refused_at = 0.0
            if outcome == "whole":
                counts["whole"] += 1
            else:
                counts["failed"].append(outcome)
            number = next(numbers)
            print(json.dumps(counts), flush=True)

    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        clients = [asyncio.create_task(client(http)) for _ in range(CLIENTS)]
        await reading.read()
        ended.set()
        await asyncio.gather(*clients)
    print(json.dumps(counts), flush=True)


async def _stream(http: aiohttp.ClientSession, url: str, model: str, number: int) -> str:
    """Ask for a stream; return "whole", "refused", "put_off", or what is wrong with it."""
    words = " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 60))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{number} {words}"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, text = 0, ""
    try:
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            status = answer.status
            text = (await answer.read()).decode()
    except (aiohttp.ClientError, OSError) as error:
        return f"{status} {error!r}" if status else "refused"
    if status in (429, 503) and "Retry-After" in answer.headers:
        return "put_off"
    if status != 200:
        return f"{status} {text[:300]}"
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        return f"no end: {events[-1:]}"
    parts = [json.loads(event) for event in events[:-1]]
    if errors := [part for part in parts if "error" in part]:
        return f"{errors}"
    output = "".join(choice["delta"].get("content") or "" for part in parts for choice in part["choices"]).split()
    reasons = Counter(
        choice["finish_reason"] for part in parts for choice in part["choices"] if choice["finish_reason"]
    )
    if reasons != {"length": 1} or len(output) != TOKENS:
        return f"{len(output)} of {TOKENS} words, {reasons}"
    return "whole"


if __name__ == "__main__":
    kind, *where = sys.argv[1:]
    if kind == "vendors":
        print(json.dumps(_ask_vendors(*where)))
    else:
        asyncio.run(_load(*where))
