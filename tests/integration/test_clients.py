"""What clients' own code makes of the gateway's errors: what it makes of an engine's, or of OpenAI's and Anthropic's own.

Clients decide by the class of an error whether they send a request again, wait, or give up. A full context is tried with a real
engine (tests/engine/test_clients.py).
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pointsman_gateway.core.api import Endpoint
from tests.support.clients.programs import Case, asked
from tests.support.fakes.gateway_peers import MODEL, FakeEngine, refusal, stack
from tests.support.gateway_requests import BODIES, post

pytestmark = pytest.mark.timeout(400)

# Word of a prompt -> the engine's mode.
MODES = {"well": "ok", "bad": "400", "error": "500", "cut": "cut"}
# Tenant -> the code with which the router refuses its requests.
REFUSED = {"busy": 8, "outage": 14}
KEYS = "busy:sk-busy\noutage:sk-outage\nrate:sk-rate tokens_per_minute=1\nwell:sk-well\n"
# Anthropic has a status of its own for an overload, 529. The gateway answers 503 as to other APIs, which proxies know; clients
# send both again.
OVERLOADED = {"OverloadedError": "ServiceUnavailableError", "AnthropicOverloadedError": "AnthropicAPIError"}


class EngineByPrompt(FakeEngine):
    """An engine whose mode is that of the prompt."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.text()
        this = copy.copy(self)
        this.mode = next(mode for word, mode in MODES.items() if f'"{word} prompt' in raw)
        return await FakeEngine.generate(this, request)


async def _provider(request: web.Request) -> web.Response:
    """Answer as OpenAI and Anthropic do beyond a rate limit, and when they are overloaded."""
    by_anthropic = request.path.endswith("/messages")
    if request.path.startswith("/outage"):
        status, kind, code = 529 if by_anthropic else 503, "overloaded_error", None
    else:
        status, kind, code = 429, "rate_limit_error", "rate_limit_exceeded"
    error: dict[str, object] = {"type": kind, "message": "Not now."}
    body: dict[str, object] = (
        {"type": "error", "error": error} if by_anthropic else {"error": error | {"param": None, "code": code}}
    )
    return web.json_response(body, status=status, headers={"Retry-After": "1"})


@asynccontextmanager
async def provider() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/{any:.*}", _provider)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_clients_see_what_they_would_see_without_the_gateway(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    async with stack(tmp_path, engine=EngineByPrompt, api_keys_file=keys) as up, provider() as providers:
        first = up.router.placer
        up.router.placer = lambda asked: (
            refusal(asked, REFUSED[asked.tenant], "no", 1) if asked.tenant in REFUSED else first(asked)
        )
        # It takes what its key has.
        chat = BODIES[Endpoint.CHAT] | {"messages": [{"role": "user", "content": "well prompt"}]}
        assert (await post(up, Endpoint.CHAT.value, json=chat, headers={"Authorization": "Bearer sk-rate"}))[0] == 200
        cases: list[Case] = []
        for stream in (False, True):
            for word in ("well", "bad", "error", *(["cut"] if stream else [])):
                for at, url in (("there", up.engines[0].url), ("here", up.url)):
                    name = f"{word} {stream} {at}"
                    cases.append(Case(name, url, "sk-well", MODEL, f"{word} prompt", stream))
            for word in ("rate", "busy", "outage"):
                for at, url in (("there", f"{providers}/{word}"), ("here", up.url)):
                    cases.append(Case(f"{word} {stream} {at}", url, f"sk-{word}", MODEL, "well prompt", stream))
        found = await asked(cases)
    differing = {}
    for (client, case), saw in found.items():
        name, _, at = case.rpartition(" ")
        if at == "here":
            there = found[client, f"{name} there"]
            # A broken connection and an error in a stream have classes of their own.
            same = saw != "answer" if name.startswith("cut") else saw == OVERLOADED.get(there, there)
            if not same:
                differing[client, name] = there, saw
    assert not differing
    assert {saw for (_, case), saw in found.items() if case.startswith("well")} == {"answer"}
    assert "answer" not in {saw for (_, case), saw in found.items() if not case.startswith(("well", "cut"))}
    assert len(found) == 14 * len(cases)
