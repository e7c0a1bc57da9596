"""Bad input: ten thousand malformed requests of many kinds; each is refused or its connection closed, and nothing stays open."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pointsman_gateway.core.api import ROUTES, ApiRequestError, openai_checks
from pointsman_gateway.core.api.field_checks import SAMPLING, Rule, check_fields
from tests.support.fakes.gateway_peers import MODEL, Stack, stack
from tests.support.gateway_requests import CHAT
from tests.support.processes.gateway import gateway_running, logged_url, ready

CASES = 10_000
AT_ONCE = 100
PATIENCE_S = 60.0
VALUES: list[Any] = [
    *(True, False, 0, -1, 2**31, 2**64, 10**400, 1.5, -0.0, 1e308, "", "x", "\x00", "é" * 100),
    *([], [1], [None], [[]], ["x"], {}, {"a": 1}, {"": {}}, [{}], [-1], [2**40], [True], [1, "x"]),
]
Pieces = list[bytes]


def http(body: bytes, path: str = "/v1/chat/completions", extra: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nConnection: close\r\n".encode()
    return head + extra + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def encoded(value: Any) -> bytes:
    return http(json.dumps(value).encode())


def noise(rng: random.Random) -> Pieces:
    return [rng.randbytes(rng.randrange(1, 400)) for _ in range(rng.randrange(1, 4))]


def mutated(rng: random.Random) -> Pieces:
    """A request with some bytes changed, added or removed, which may still be valid."""
    whole = bytearray(encoded(CHAT))
    for _ in range(rng.randrange(1, 8)):
        at = rng.randrange(len(whole))
        whole[at : at + rng.randrange(3)] = rng.choice([b"", b"\r", b"\n", b"\0", b" ", b":", b'"', rng.randbytes(2)])
    return cut(rng, bytes(whole))


def cut(rng: random.Random, whole: bytes) -> Pieces:
    at = sorted(rng.randrange(len(whole) + 1) for _ in range(rng.randrange(4)))
    return [whole[start:end] for start, end in zip([0, *at], [*at, len(whole)], strict=True)]


def huge_head(rng: random.Random) -> Pieces:
    long = b"x" * rng.randrange(33_000, 200_000)
    kind = rng.randrange(4)
    if kind == 0:
        return [http(b"{}", extra=b"X-A: " + long + b"\r\n")]
    if kind == 1:
        return [http(b"{}", extra=long + b": a\r\n")]
    if kind == 2:
        return [http(b"{}", extra=b"X-A: a\r\n" * rng.randrange(101, 3_000))]
    return [b"GET /" + long + b" HTTP/1.1\r\nHost: h\r\n\r\n"]


def unfinished(rng: random.Random) -> Pieces:
    """A request whose last bytes are never sent."""
    whole = encoded(CHAT)
    return cut(rng, whole[: rng.randrange(1, len(whole))])


def bad_chunks(rng: random.Random) -> Pieces:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    body = json.dumps(CHAT).encode()
    size = rng.choice(
        [b"-1", b"zz", b"", b" 5", b"fffffffffffffffff", b"%x" % (len(body) + 3), b"%x" % (len(body) - 3)]
    )
    return cut(rng, head + size + b"\r\n" + body + b"\r\n0\r\n\r\n" + b"x" * 8)


def smuggling(rng: random.Random) -> Pieces:
    extra = rng.choice(
        [b"Transfer-Encoding: chunked", b"Content-Length: 1", b"Transfer-Encoding: xchunked", b" folded"]
    )
    return cut(rng, http(b"{}", extra=extra + b"\r\n"))


def not_utf8(rng: random.Random) -> Pieces:
    bad = rng.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xe2\x82"])
    return cut(rng, http(json.dumps(CHAT).encode().replace(b"set", b"s" + bad + b"t")))


def deep(rng: random.Random) -> Pieces:
    depth = rng.choice([2_000, 20_000, 100_000])
    inner = b"[" * depth + b"]" * depth if rng.random() < 0.5 else b'{"a":' * depth + b"1" + b"}" * depth
    field = rng.choice([b"messages", b"tools", b"metadata", b"chat_template_kwargs"])
    return [http(b'{"model":"tiny","%b":%b}' % (field, inner))]


def _is_refused(name: str, value: object, rules: Mapping[str, Rule]) -> bool:
    try:
        check_fields({name: value}, rules)
    except ApiRequestError:
        return True
    return False


def wrong_type(rng: random.Random) -> Pieces:
    """One known field with a value that it cannot have."""
    requests: list[tuple[str, Mapping[str, Rule], dict[str, Any]]] = [
        ("/v1/chat/completions", openai_checks._CHAT, dict(CHAT)),
        ("/v1/completions", SAMPLING, {"model": MODEL, "prompt": "set the points"}),
    ]
    path, rules, good = rng.choice(requests)
    name = rng.choice(sorted(rules))
    good[name] = rng.choice([value for value in VALUES if _is_refused(name, value, rules)])
    return [http(json.dumps(good).encode(), path)]


def wrong_shape(rng: random.Random) -> Pieces:
    """A prompt, model or body of a shape that is none."""
    value = rng.choice([value for value in VALUES if value != "x"])
    no_chat = rng.choice([[], {}, "x", 3, [3], [[]], ["x"], [{}], [{"role": 1}], [{"role": "user", "content": 3}]])
    return [
        encoded(
            rng.choice(
                [
                    value,
                    CHAT | {"model": value},
                    CHAT | {"messages": no_chat},
                    {"model": MODEL},
                    {**CHAT, "model": None},
                ]
            )
        )
    ]


def wrong_place(rng: random.Random) -> Pieces:
    method = rng.choice([b"GET", b"PUT", b"DELETE", b"TRACE", b"CONNECT", b"PATCH"])
    path = rng.choice([b"/", b"*", b"//v1/models", b"/v1/../metrics", b"/%2e%2e", b"/collective_rpc", b"x:1"])
    path = rng.choice([path, rng.choice(sorted(ROUTES)).encode()])
    return [b"%b %b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" % (method, path)]


# Relative frequency of each kind; mutated requests may be valid.
KINDS: dict[Callable[[random.Random], Pieces], int] = {
    noise: 20,
    mutated: 10,
    huge_head: 5,
    unfinished: 5,
    bad_chunks: 10,
    smuggling: 10,
    not_utf8: 5,
    deep: 3,
    wrong_type: 20,
    wrong_shape: 10,
    wrong_place: 10,
}


async def case(port: int, pieces: Pieces) -> int:
    """Return the status of the response, or 0 if the connection was closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        while got := await reader.read(65536):
            answer += got
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return int(answer.split(b" ", 2)[1]) if answer else 0


async def fuzz(port: int) -> dict[str, Counter[int]]:
    rng = random.Random(4)
    kinds = rng.choices(list(KINDS), weights=list(KINDS.values()), k=CASES)
    waiting = iter([(kind.__name__, kind(rng)) for kind in kinds])
    seen: dict[str, Counter[int]] = {kind.__name__: Counter() for kind in KINDS}

    async def some() -> None:
        for name, pieces in waiting:
            async with asyncio.timeout(PATIENCE_S):
                seen[name][await case(port, pieces)] += 1

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return seen


@pytest.mark.timeout(300)
async def test_ten_thousand_bad_requests_leave_nothing(tmp_path: Path) -> None:
    async with stack(tmp_path) as up:
        limits = {
            "HEADER_TIMEOUT_S": "0.5",
            "BODY_TIMEOUT_S": "0.5",
            "KEEPALIVE_TIMEOUT_S": "0.5",
            "MAX_BODY_BYTES": "1000000",
        }
        async with gateway_running({"LISTEN": "127.0.0.1:0", "ROUTERS": up.router.address, **limits}) as (_, log):
            url = await logged_url(log)
            await ready(url)
            seen = await fuzz(int(url.rpartition(":")[2]))
            for name, counts in seen.items():
                fine = {0, 200} if name == "mutated" else {0}
                assert all(400 <= status < 500 or status in fine or status == 505 for status in counts), (name, counts)
            assert sum(sum(counts.values()) for counts in seen.values()) == CASES
            # If this client is slow to send, a short deadline closes its connection. Many such cases would prove little.
            for name, status in (("wrong_type", 400), ("deep", 400), ("unfinished", 408), ("huge_head", 431)):
                assert set(seen[name]) <= {0, 408, status}
                assert seen[name][status] > sum(seen[name].values()) / 2
            await settled(url, up)
        logged = [json.loads(line) for line in log]
        assert [line for line in logged if line["level"] in ("error", "critical")] == []


async def settled(url: str, up: Stack) -> None:
    """Wait until no request is open at the gateway, the router or the engines."""
    async with aiohttp.ClientSession() as client:
        while True:
            async with client.get(f"{url}/metrics") as answer:
                text = await answer.text()
            if "pointsman_gateway_open_requests 0.0" in text and not up.router.reserved:
                break
            await asyncio.sleep(0.05)
        assert all(engine.open == 0 for engine in up.engines)
        async with client.post(f"{url}/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200
