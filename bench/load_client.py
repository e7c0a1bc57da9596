"""Load client with little CPU cost, a separate program on bare uvloop. Prints one JSON object.

Each of `--connections` sends chats with new prompts of about `--prompt` bytes until `--requests` are answered in all. Answers are
not parsed: an event stream ends with the empty last chunk, any other answer after its Content-Length. With `--mix` the requests
are of all kinds (MIX), and some clients disconnect at the first byte and reconnect. If the server closes an idle connection just
when the next request is sent on it, the request is sent again on a new connection and does not count as failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import uvloop

SAMPLES = 1_000  # approximate number of times to first byte that are printed, evenly from their sorted order
# Kind of request -> its share of a mix.
MIX = {"stream": 0.55, "whole": 0.2, "leave": 0.1, "wrong": 0.05, "models": 0.1}
WORDS = [
    "set",
    "the",
    "points",
    "so",
    "that",
    "each",
    "train",
    "takes",
    "right",
    "track",
    "and",
    "none",
    "must",
    "wait",
    "for",
    "another",
    "at",
    "night",
]


@dataclass
class LoadRun:
    """Parameters and results of a run, shared by its connections."""

    url: tuple[str, int]  # host and port
    requests: int  # to be answered in all
    stream: bool  # whether answers are event streams
    chunks: int  # max_tokens of each request
    prompt: int  # its length, bytes, about
    rng: random.Random  # draws kinds and prompts of the requests
    hold: bool  # keep the answers open once all have begun
    mix: bool = False  # requests of all kinds (MIX)
    prompts: int = 0  # number of different prompts; 0: each is new
    asked: int = 0  # requests handed to connections, repeated ones once
    answered: int = 0  # with the status that their kind expects, to the answer's end or as far as the client reads it
    failed: int = 0  # with another status, or without a whole answer
    failures: Counter[str] = field(default_factory=Counter)  # by the head's first line, or "" without one
    received: int = 0  # chunks
    reads: int = 0  # from the sockets
    first_s: list[float] = field(default_factory=list)  # times to first byte
    done: asyncio.Event = field(default_factory=asyncio.Event)  # set when all requests are answered or failed
    reconnecting: set[asyncio.Task[None]] = field(default_factory=set)  # connections being opened; each removes itself
    repeated: int = 0  # requests that met a connection closed as idle

    def next_request(self) -> tuple[bytes, str] | None:
        """Return the bytes and the kind of the next request; None if all have been returned. Mutates."""
        if self.asked == self.requests:
            return None
        self.asked += 1
        if self.mix:
            (kind,) = self.rng.choices(list(MIX), list(MIX.values()))
        else:
            kind = "stream" if self.stream else "whole"
        if kind == "models":
            return f"GET /v1/models HTTP/1.1\r\nHost: {self.url[0]}\r\n\r\n".encode(), kind
        rng = random.Random(self.rng.randrange(self.prompts)) if self.prompts else self.rng
        words = [str(rng.random()), *rng.choices(WORDS, k=self.prompt // 5)]
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": -1 if kind == "wrong" else self.chunks,
            "stream": kind in ("stream", "leave"),
        }
        raw = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.url[0]}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw, kind

    async def connect(self, count: int = 1, spread_s: float = 0.0) -> None:
        """Open `count` connections, evenly over `spread_s`."""
        await asyncio.gather(*(self._connect(number * spread_s / count) for number in range(count)))

    def reconnect(self, asked: tuple[bytes, str] | None = None) -> None:
        """Open a connection in the background; it first sends `asked`, a request to repeat, if given."""
        reconnecting = asyncio.get_running_loop().create_task(self._connect(0.0, asked))
        self.reconnecting.add(reconnecting)
        reconnecting.add_done_callback(self.reconnecting.discard)

    async def _connect(self, after_s: float, asked: tuple[bytes, str] | None = None) -> None:
        await asyncio.sleep(after_s)
        await asyncio.get_running_loop().create_connection(lambda: Client(self, asked), *self.url)

    def note(self, *, ok: bool, head: str = "") -> None:
        """Count an ended request; `head` is its answer's first line. Mutates."""
        self.answered += ok
        self.failed += not ok
        if not ok:
            self.failures[head] += 1
        if self.answered + self.failed == self.requests:
            self.done.set()


class Client(asyncio.Protocol):
    """One connection, which sends a request after each answer."""

    def __init__(self, run: LoadRun, asked: tuple[bytes, str] | None = None) -> None:
        self._run = run
        self._asked = asked
        self._served = False
        self._waits = False
        self._tail = b""
        self._left = -1  # bytes of a body with a length

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask(self._asked or self._run.next_request())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._waits:
            return
        self._waits = False
        if self._served and self._first and not self._tail:
            self._run.repeated += 1
            self._run.reconnect(self._asked)
        else:
            self._run.note(ok=False)

    def _ask(self, asked: tuple[bytes, str] | None) -> None:
        if asked is None:
            self._transport.close()
            return
        self._asked = asked
        request, self._kind = asked
        self._sent, self._waits, self._first, self._tail, self._left = time.perf_counter(), True, True, b"", -1
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        run = self._run
        run.received += data.count(b'"delta"')
        run.reads += 1
        if self._first:
            if self._tail:
                data = self._tail + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._tail = data
                return
            self._first = False
            run.first_s.append(time.perf_counter() - self._sent)
            head = data[:end].lower()
            self._status = head.partition(b"\r\n")[0].decode("latin-1")
            self._ok = head.startswith(b"http/1.1 400" if self._kind == "wrong" else b"http/1.1 200")
            if self._kind == "leave":
                self._leave()
                return
            at = head.find(b"content-length:")
            if at >= 0:
                self._left = int(head[at + 15 :].split(b"\r\n", 1)[0])
                data = data[end + 4 :]
        if self._left >= 0:
            self._left -= len(data)
            over = self._left <= 0
        else:
            self._tail = (self._tail + data)[-32:]
            over = self._tail.endswith(b"0\r\n\r\n")
        if over:
            self._waits, self._served = False, True
            run.note(ok=self._ok, head=self._status)
            self._ask(run.next_request())

    def _leave(self) -> None:
        self._waits = False
        self._transport.abort()
        self._run.note(ok=self._ok, head=self._status)
        self._run.reconnect()


async def go(run: LoadRun, connections: int, group: int, spread_s: float) -> dict[str, object]:
    """Open the connections and wait until all requests are answered; return the results. With `hold` it never returns."""
    began = time.perf_counter()
    for start in range(0, connections, group):
        await run.connect(min(group, connections - start), spread_s)
        while run.hold and len(run.first_s) < min(start + group, connections) and not run.failed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    if run.hold:
        print("held", flush=True)
        await asyncio.Event().wait()
    await run.done.wait()
    first = sorted(seconds * 1e3 for seconds in run.first_s)
    return {
        "answered": run.answered,
        "failed": run.failed,
        "failures": run.failures,
        "repeated": run.repeated,
        "chunks": run.received,
        "reads": run.reads,
        "wall_s": time.perf_counter() - began,
        "first_ms": first[:: max(1, len(first) // SAMPLES)],
    }


def tell(result: object) -> None:
    """Print `result` as a line of JSON. With PYTHONUNBUFFERED print() writes once, of which a pipe may take only a part."""
    with open(sys.stdout.fileno(), "w", closefd=False) as out:
        print(json.dumps(result), file=out)


def main() -> None:
    """Run the client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument(
        "--group", type=int, default=100, help="connections opened at once; --hold waits for each group"
    )
    parser.add_argument("--spread-ms", type=float, default=0.0, help="time over which a group's connections are opened")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=0, help="chunks of each answer; 0: not streamed")
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--hold", action="store_true", help='print "held" when every answer has begun, and keep running'
    )
    parser.add_argument("--prompts", type=int, default=0, help="number of different prompts; 0: each is new")
    parser.add_argument("--mix", action="store_true", help="send requests of all kinds")
    given = parser.parse_args()

    async def run() -> dict[str, object]:
        asking = LoadRun(
            ("127.0.0.1", given.port),
            given.requests,
            given.chunks > 0,
            given.chunks or 1,
            given.prompt,
            random.Random(given.seed),
            given.hold,
            given.mix,
            given.prompts,
        )
        return await go(asking, given.connections, given.group, given.spread_ms / 1e3)

    tell(uvloop.run(run()))


if __name__ == "__main__":
    main()
