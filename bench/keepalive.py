"""Writes docs/keepalive.md: whether a client sees a reset when a connection is used again after some idle time, on both sides.

`python -m bench.keepalive [LONGEST_S]` (needs `make env-engine`; by default 4,000 s, in real time: 67 minutes, nearly all
of it idle). Exits with status 1 if a client saw a reset after an idle time for which the gateway keeps connections, or any
on the engines' side.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence

from bench import stack
from bench.judged_fleet import Judged, real
from bench.mock_engine import Engine
from pointsman_gateway.io.engines.connection_pool import KEEPALIVE_S
from pointsman_gateway.io.settings import GatewaySettings
from tests.support.processes.process import free_port
from tests.support.repository import REPOSITORY

PAGE = REPOSITORY / "docs/keepalive.md"
UVICORN_S = 5.0  # vLLM's server closes idle connections then
GATEWAY_S: float = GatewaySettings.model_fields["keepalive_timeout_s"].default
# How long clients keep idle connections by default, s.
IDLE_S: Sequence[tuple[float, str]] = (
    (1.0, "-"),
    (4.0, "Node's fetch (undici)"),
    (UVICORN_S, "httpx, so the clients of OpenAI and Anthropic for Python"),
    (15.0, "aiohttp"),
    (30.0, "-"),
    (60.0, "nginx (upstream), AWS's load balancers"),
    (90.0, "Go, Rust's hyper"),
    (118.0, "curl"),
    (600.0, "Google's load balancers"),
    (3_600.0, "Envoy"),
    (GATEWAY_S, "requests (urllib3), which never closes one"),
)
CONNECTIONS = 20  # for each idle time and server
JITTER_S = 0.1  # around an idle time
# A close and a request cross if less than this is between them: 25 ms each way.
CROSSING_S = 0.05
WITHIN_S = 120.0
AT_ONCE = 8
# The engines' side: their idle times, s, and requests after gaps of (0.9 to 1.1 of) them, by so many clients.
ENGINE_IDLE_S = (0.05, 0.2, 1.0, UVICORN_S)
REQUESTS, CLIENTS = 12, 8

INTRO = """# Reuse of idle connections

Written by `python -m bench.keepalive`; not by hand.

## Clients

A client that uses a kept connection while its server closes it sees a reset, and may send a POST again only at the risk
that it runs twice. So a server has to keep idle connections longer than its clients do. vLLM's server (uvicorn) closes them
after {uvicorn:.0f} s, the gateway after `keepalive_timeout_s` ({gateway:,.0f} s). Here a connection was left idle, in real
time, and used again: {count} connections for each row, spread over {jitter:.0f} ms before and after its time, 25 ms away
from the server: what the server does less than {crossing:.0f} ms before a request arrives, the client does not know when it
sends it. `closed`: the client knew, and opens another connection. **`reset`**: the client had sent its request.

| idle, s | clients that keep theirs so long | vLLM | gateway |
|---|---|---|---|
"""
ENGINES = """
Behind a load balancer that keeps connections for more than {gateway:,.0f} s (AWS's can be set to 4,000), set
`keepalive_timeout_s` above that.

## Engines

The gateway closes its own idle connections to engines after {pool:.0f} s. If an engine closes one while a request is on its
way, the gateway sends it once more on a new connection. Here an engine (a mock) keeps connections for a time of its own,
and breaks the connection when a request arrives on it later, as it looks if both cross; {clients} clients send one request
after another with a pause of 0.9 to 1.1 of that time, half of them streamed.

| engine's idle time, s | it ends by | requests | crossed | seen by clients |
|---|---|---|---|---|
"""


def _request(model: str, stream: bool = False) -> bytes:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": stream}
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: judged\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _answer(reader: asyncio.StreamReader) -> int:
    """Return the status of an answer, read to its end. Raises EOFError or OSError if the connection ended."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + 2)
        await reader.readexactly(2)
    else:
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
    return int(head.split(b" ", 2)[1])


# ---- clients ----


async def once_more(url: str, model: str, idle_s: float, room: asyncio.Semaphore) -> str:
    """Use a connection again after `idle_s`: return "answered", "closed" or "reset"."""
    port = int(url.rpartition(":")[2])
    async with room:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_request(model))
        assert await _answer(reader) == 200
        since = time.monotonic()
    try:
        await asyncio.sleep(since + idle_s - CROSSING_S - time.monotonic())
        if reader.at_eof():
            return "closed"
        await asyncio.sleep(since + idle_s - time.monotonic())
        try:
            writer.write(_request(model))
            async with asyncio.timeout(WITHIN_S):
                return "answered" if await _answer(reader) == 200 else "refused"
        except (EOFError, OSError):
            return "reset"
    finally:
        writer.close()


async def clients(fleet: Judged, longest_s: float) -> list[tuple[float, str, Counter[str], Counter[str]]]:
    """Return for each idle time up to `longest_s` who uses it, and what clients of the engine and of the gateway see."""
    room = asyncio.Semaphore(AT_ONCE)

    async def seen(url: str, idle_s: float) -> Counter[str]:
        spread = [idle_s + JITTER_S * (2 * at / (CONNECTIONS - 1) - 1) for at in range(CONNECTIONS)]
        return Counter(await asyncio.gather(*(once_more(url, fleet.model, each, room) for each in spread)))

    rows = [row for row in IDLE_S if row[0] <= longest_s]
    found = await asyncio.gather(*(seen(url, idle_s) for idle_s, _ in rows for url in (fleet.engine, fleet.gateway)))
    return [(*row, found[2 * at], found[2 * at + 1]) for at, row in enumerate(rows)]


# ---- engines ----


class Closing(Engine):
    """A mock engine that ends a connection, without an answer, when a request arrives on it after `idle_s`."""

    idle_s = math.inf
    by_reset = False
    crossed = 0
    _since: float | None = None

    def data_received(self, data: bytes) -> None:
        if self._since is not None and time.monotonic() - self._since > self.idle_s:
            Closing.crossed += 1
            if self.by_reset:
                self._transport.abort()
            else:
                self._transport.close()
            return
        super().data_received(data)
        self._since = time.monotonic()


async def _client(port: int, pause_s: Sequence[float]) -> Counter[str]:
    """Send a request after each pause on a kept connection; return what was seen."""
    seen: Counter[str] = Counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for at, pause in enumerate(pause_s):
        await asyncio.sleep(pause)
        writer.write(_request(stack.MODEL, stream=at % 2 == 1))
        try:
            seen["answered" if await _answer(reader) == 200 else "refused"] += 1
        except (EOFError, OSError):
            seen["reset"] += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    return seen


async def engines() -> list[tuple[float, str, int, Counter[str]]]:
    """Return for each idle time of an engine how it ends connections, the requests that crossed, and what clients saw."""
    found = []
    port = free_port()
    server = await asyncio.get_running_loop().create_server(Closing, "127.0.0.1", port)
    async with server, stack.pointsman([stack.ServerProcess(port, ())], "") as (gateway, _):
        for idle_s in ENGINE_IDLE_S:
            for by_reset in (False, True):
                Closing.idle_s, Closing.by_reset, Closing.crossed = idle_s, by_reset, 0
                pauses = [
                    [idle_s * (0.9 + 0.2 * ((at * 5 + client) % 13) / 12) for at in range(REQUESTS)]
                    for client in range(CLIENTS)
                ]
                seen = sum(await asyncio.gather(*(_client(gateway.port, each) for each in pauses)), Counter[str]())
                found.append((idle_s, "reset" if by_reset else "end", Closing.crossed, seen))
                print(found[-1], file=sys.stderr)
    return found


# ---- the page ----


def _told(seen: Counter[str]) -> str:
    return ", ".join(
        f"**{count} reset**" if kind == "reset" else f"{count} {kind}" for kind, count in sorted(seen.items())
    )


async def judged(longest_s: float) -> tuple[str, bool]:
    """Return the page, and whether no client saw what it must not see."""
    behind = await engines()
    async with real() as fleet:
        before = await clients(fleet, longest_s)
    parts = [
        INTRO.format(
            uvicorn=UVICORN_S, gateway=GATEWAY_S, count=CONNECTIONS, jitter=1e3 * JITTER_S, crossing=1e3 * CROSSING_S
        )
    ]
    parts += [f"| {idle:,.0f} | {who} | {_told(own)} | {_told(through)} |\n" for idle, who, own, through in before]
    parts.append(ENGINES.format(gateway=GATEWAY_S, pool=KEEPALIVE_S, clients=CLIENTS))
    parts += [
        f"| {idle} | {how} | {seen.total()} | {crossed} | {_told(seen)} |\n" for idle, how, crossed, seen in behind
    ]
    fine = all(through.keys() == {"answered"} for idle, _, _, through in before if idle < GATEWAY_S)
    return "".join(parts), fine and all(seen.keys() == {"answered"} for *_, seen in behind)


def main(longest_s: float = 4_000.0) -> int:
    """Run, write the page, and return the process's exit status."""
    text, fine = asyncio.run(judged(longest_s))
    PAGE.write_text(text)
    print(text)
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
