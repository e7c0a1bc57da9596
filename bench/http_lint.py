"""Checks the gateway's answers with httplint, which is installed into a virtual environment of its own in .state."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

from bench import stack
from bench.figures import Figure
from bench.gateway import fleet

HTTPLINT = "httplint==2026.10.4"
CHAT = {"model": stack.MODEL, "messages": [{"role": "user", "content": "set the points"}], "max_tokens": 2}
ORIGIN = "https://app.example"
KEY = {"Authorization": "Bearer sk-a"}
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}
# Name of a request -> method, path, header fields, body.
ASKED: dict[str, tuple[str, str, Mapping[str, str], object]] = {
    "models": ("GET", "/v1/models", KEY | {"Origin": ORIGIN}, None),
    "models, HEAD": ("HEAD", "/v1/models", KEY, None),
    "chat": ("POST", "/v1/chat/completions", KEY, CHAT),
    "stream": ("POST", "/v1/chat/completions", KEY, CHAT | {"stream": True}),
    "error": ("POST", "/v1/chat/completions", KEY, CHAT | {"max_tokens": -1}),
    "anthropic error": ("POST", "/v1/messages", KEY, {"model": "none"}),
    "unknown path": ("GET", "/v1/nothing", {}, None),
    "no key": ("POST", "/v1/chat/completions", {}, CHAT),
    "wrong method": ("GET", "/v1/chat/completions", KEY, None),
    "too many": ("POST", "/v1/chat/completions", {"Authorization": "Bearer sk-b"}, CHAT),
    "options": ("OPTIONS", "/v1/models", {}, None),
    "preflight": ("OPTIONS", "/v1/chat/completions", PREFLIGHT, None),
    "wrong expectation": ("GET", "/v1/models", {"Expect": "x"}, None),
    "health": ("GET", "/health", {}, None),
    "livez": ("GET", "/livez", {}, None),
    "metrics": ("GET", "/metrics", {}, None),
}


def executable() -> Path:
    """Return the path of httplint, installed on first use. Raises CalledProcessError if it cannot be installed."""
    folder = Path(".state") / "httplint"
    if not (folder / "bin" / "httplint").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", HTTPLINT], check=True)
    return folder / "bin" / "httplint"


async def answer(port: int, name: str) -> bytes:
    """Send the request `name` of ASKED; return the bytes of the answer."""
    method, path, fields, body = ASKED[name]
    raw = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: h",
        "Connection: close",
        *(f"{field}: {fields[field]}" for field in fields),
    ]
    lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}"] if body is not None else []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
    try:
        return await reader.read()
    finally:
        writer.close()


def notes(httplint: Path, name: str, answered: bytes) -> list[str]:
    """Return httplint's BAD and WARN notes on an answer."""
    head = answered.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if ASKED[name][0] == "HEAD" else answered
    out = subprocess.run([str(httplint), "-n"], input=head, capture_output=True, check=True).stdout.decode()
    said = (line.strip("* ") for line in out.splitlines())
    # httplint does not see the request, so it does not accept a preflight's fields in the answer to a preflight.
    known = ("[BAD] CORS headers are only allowed in preflight",) if name == "preflight" else ("\0",)
    return [line for line in said if line.startswith(("[BAD]", "[WARN]")) and not line.startswith(known)]


async def http_lint() -> list[Figure]:
    """bad_http_notes, warned_http_notes."""
    httplint = await asyncio.to_thread(executable)
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("a:sk-a\nb:sk-b requests_per_minute=1\n")
        async with fleet(0.0) as (engines, model):
            flags = ["--api-keys-file", str(keys), "--cors-origins", ORIGIN]
            async with stack.pointsman(engines, model, *flags) as (gateway, _):
                await answer(gateway.port, "too many")
                for name in ASKED:
                    answered = await answer(gateway.port, name)
                    for note in await asyncio.to_thread(notes, httplint, name, answered):
                        found.setdefault(note, []).append(name)
    notes_of = {
        level: [f"{note} ({', '.join(of)})" for note, of in found.items() if level in note] for level in ("BAD", "WARN")
    }
    return [
        Figure(
            "bad_http_notes",
            len(notes_of["BAD"]),
            "",
            None,
            f"{len(ASKED)} answers; goal 0; {'; '.join(notes_of['BAD'])}",
        ),
        Figure("warned_http_notes", len(notes_of["WARN"]), "", None, "; ".join(notes_of["WARN"])),
    ]
