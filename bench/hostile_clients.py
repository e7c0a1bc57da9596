"""Program that runs clients of one kind for `bench hostile`: `ordinary` ones, which print what they measured, or hostile ones.

Hostile clients print "ready" when they are running, and continue until the process is killed. The rate of each is limited here.
So their effect on other clients is due to the gateway, and not to the CPU time that they take on its machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

import uvloop

from bench.load_client import WORDS, tell

KEY = "sk-0"
PATH = "/v1/chat/completions"
CHUNKS = 25
# Length of a large body, bytes; just under 32 MiB.
LARGE = (32 << 20) - 1000


def chat(words: int = 200, **fields: object) -> bytes:
    """Return the body of a chat request with a new prompt of `words` words."""
    text = " ".join([str(random.random()), *random.choices(WORDS, k=words)])
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


def head(length: int, key: str = KEY, *more: str) -> bytes:
    """Return a request's head, for a body of `length` bytes. `more`: further lines."""
    lines = [f"POST {PATH} HTTP/1.1", "Host: h", "Content-Type: application/json", f"Authorization: Bearer {key}"]
    return "\r\n".join([*lines, *more, f"Content-Length: {length}", "", ""]).encode()


class Ordinary(asyncio.Protocol):
    """Connection that requests one stream after the other, and records TTFTs, gaps between tokens and failures."""

    def __init__(self, ttft_ms: list[float], gaps_ms: list[float], failures: list[str]) -> None:
        self._ttft_ms, self._gaps_ms, self._failures = ttft_ms, gaps_ms, failures

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._failures.append("the connection was closed")

    def _ask(self) -> None:
        body = chat(max_tokens=CHUNKS, stream=True)
        self._asked, self._last = time.perf_counter(), 0.0
        self._transport.write(head(len(body)) + body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self._failures.append(data.partition(b"\r\n")[0].decode("latin-1"))
            asyncio.get_running_loop().call_later(0.1, self._ask)
            return
        if b'"delta"' in data:
            if self._last:
                self._gaps_ms.append((now - self._last) * 1e3)
            else:
                self._ttft_ms.append((now - self._asked) * 1e3)
            self._last = now
        if data.endswith(b"0\r\n\r\n"):
            self._ask()


async def ordinary(port: int, connections: int, seconds: float) -> dict[str, object]:
    """Run `connections` ordinary clients for `seconds`; return what they measured."""
    ttft_ms: list[float] = []
    gaps_ms: list[float] = []
    failures: list[str] = []
    loop = asyncio.get_running_loop()
    for at in range(connections):
        await loop.create_connection(lambda: Ordinary(ttft_ms, gaps_ms, failures), "127.0.0.1", port)
        await asyncio.sleep(0.5 / connections * (at % 7) / 3)
    await asyncio.sleep(seconds)
    return {"ttft_ms": ttft_ms, "gaps_ms": gaps_ms, "failures": list(failures)}


async def _connected(port: int, room: int = 0) -> socket.socket:
    own = socket.socket()
    if room:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
    return own


async def slow_reader(port: int) -> None:
    """Requests a long stream and reads ten bytes a second."""
    loop, own = asyncio.get_running_loop(), await _connected(port, 4096)
    body = chat(max_tokens=1_000_000, stream=True)
    await loop.sock_sendall(own, head(len(body)) + body)
    while await loop.sock_recv(own, 10):  # noqa: ASYNC110
        await asyncio.sleep(1.0)


async def slow_writer(port: int) -> None:
    """Sends a request byte by byte, ten a second."""
    loop, own = asyncio.get_running_loop(), await _connected(port)
    body = chat(max_tokens=1)
    for byte in head(len(body)) + body:
        await loop.sock_sendall(own, bytes([byte]))
        await asyncio.sleep(0.1)


async def slow_body_writer(port: int) -> None:
    """Sends a head at once, and the body byte by byte, ten a second."""
    loop, own = asyncio.get_running_loop(), await _connected(port)
    body = chat(max_tokens=1)
    await loop.sock_sendall(own, head(len(body)))
    for byte in body:
        await loop.sock_sendall(own, bytes([byte]))
        await asyncio.sleep(0.1)


async def pipeliner(port: int) -> None:
    """Sends one request after the other and reads nothing."""
    loop, own = asyncio.get_running_loop(), await _connected(port, 4096)
    body = chat(max_tokens=1)
    for _ in range(10_000):
        await loop.sock_sendall(own, head(len(body)) + body)
        await asyncio.sleep(0.05)


async def half_upload(port: int) -> None:
    """Sends a body of LARGE bytes except for its last byte."""
    loop, own = asyncio.get_running_loop(), await _connected(port)
    await loop.sock_sendall(own, head(LARGE))
    piece = b" " * (256 << 10)
    for _ in range((LARGE - 1) // len(piece)):
        await loop.sock_sendall(own, piece)
        await asyncio.sleep(0.01)
    await loop.sock_sendall(own, b" " * ((LARGE - 1) % len(piece)))
    await loop.sock_recv(own, 1000)


async def sender(kind: str, port: int) -> None:
    """Sends the body of a kind, and waits for its answer and a little longer."""
    loop, own, body, more = asyncio.get_running_loop(), await _connected(port), BODIES[kind], list[str]()
    if kind == "compressed":
        body, more = COMPRESSED, ["Content-Encoding: gzip"]
    await loop.sock_sendall(own, head(len(body), KEY, *more) + body)
    await loop.sock_recv(own, 1000)
    await asyncio.sleep(0.03)
    own.close()


def _with_tools(count: int, depth: int, width: int) -> bytes:
    """Return a chat with so many tools, whose parameters are so many objects around a list of so many numbers."""
    parameters = '{"a":' * depth + json.dumps([0] * width, separators=(",", ":")) + "}" * depth
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}'
    tools = ",".join([tool] * count)
    return f'{{"model":"m","messages":[{json.dumps(_SHORT)}],"max_tokens":1,"tools":[{tools}]}}'.encode()


async def wrong_key(port: int) -> None:
    """Sends requests with random, wrong API keys."""
    loop, own = asyncio.get_running_loop(), await _connected(port)
    for _ in range(100):
        body = chat(10, max_tokens=1)
        await loop.sock_sendall(own, head(len(body), f"sk-{random.random()}") + body)
        if not await loop.sock_recv(own, 4096):
            return
        await asyncio.sleep(0.03)


async def connection(port: int) -> None:
    """Connects and closes the connection without a request."""
    own = await _connected(port)
    await asyncio.sleep(0.03)
    own.close()


_SHORT = {"role": "user", "content": "a"}


def _with_messages(count: int) -> bytes:
    return json.dumps({"model": "m", "messages": [_SHORT] * count, "max_tokens": 1}).encode()


def _with_values(value: str, count: int) -> bytes:
    """Return a chat with one tool whose parameters are a list of so many values."""
    values = ",".join([value] * count)
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{{"a":[{values}]}}}}}}'
    return f'{{"model":"m","messages":[{json.dumps(_SHORT)}],"max_tokens":1,"tools":[{tool}]}}'.encode()


# Bodies that hostile clients send. `deep`: deeper than a gateway takes. `nested`: 28 KB, `repeated`: 200 KB, whose prompts under
# MULTIPLYING have some 240 times as many characters. `quadratic`: some 2 million iterations under MULTIPLYING. `dense`: a body
# whose values take about as much memory as a gateway accepts, `denser`: more. `compressed`: 1 MB, sent as 3 KB.
BODIES = {
    "many_messages": _with_messages(100_000),
    "deep": _with_tools(5, 940, 1),
    "nested": _with_tools(5, 118, 2_400),
    "repeated": _with_tools(12, 118, 8_000),
    "quadratic": _with_messages(2_000),
    "dense": _with_values('{"name":"a","one":"a value"}', 11_000),
    "denser": _with_values('{"a":{}}', 40_000),
    "compressed": _with_values('"a value that is repeated over and over"', 25_000),
}
COMPRESSED = gzip.compress(BODIES["compressed"])
# A template that multiplies what a client sends, as some models' do: indented tools, and a look at all later messages.
MULTIPLYING = (
    "{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}"
    "{% for m in messages %}{% for later in messages[loop.index:] %}{% if later.role == 'x' %}x{% endif %}{% endfor %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
)
MULTIPLIED = frozenset(BODIES) - {"many_messages"}
# Kind -> (what one client does repeatedly, number of clients).
HOSTILE: dict[str, tuple[Callable[[int], Awaitable[None]], int]] = {
    "slow_readers": (slow_reader, 200),
    "slow_heads": (slow_writer, 500),
    "slow_bodies": (slow_body_writer, 500),
    "pipeliners": (pipeliner, 50),
    "half_uploads": (half_upload, 16),
    "many_messages": (partial(sender, "many_messages"), 2),
    "wrong_keys": (wrong_key, 30),
    "connections": (connection, 30),
    **{kind: (partial(sender, kind), 4) for kind in sorted(MULTIPLIED)},
}


async def hostile(kind: str, port: int) -> None:
    """Run the clients of a hostile kind; never returns."""
    one, count = HOSTILE[kind]

    async def again(number: int) -> None:
        await asyncio.sleep(number / count)
        for _ in itertools.count():
            try:
                await one(port)
            except OSError:
                await asyncio.sleep(0.05)

    running = [asyncio.create_task(again(number)) for number in range(count)]
    await asyncio.sleep(2.0)
    print("ready", flush=True)
    await asyncio.gather(*running)


def main() -> None:
    """Run the clients of one kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["ordinary", *HOSTILE])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=32, help="number of ordinary clients")
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of ordinary clients, in s")
    given = parser.parse_args()
    if given.kind == "ordinary":
        tell(uvloop.run(ordinary(given.port, given.connections, given.seconds)))
    else:
        uvloop.run(hostile(given.kind, given.port))


if __name__ == "__main__":
    main()
