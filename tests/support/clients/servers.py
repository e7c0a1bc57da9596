"""Servers whose answers the prompt chooses: a fake engine, the APIs' providers emulated, and a gateway before engines."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.fakes.gateway_peers import FakeEngine, Stack, refusal, stack

# Case -> the engine's mode. The engine finds a prompt of case `full` too long.
MODES = {"well": "ok", "bad": "400", "error": "500", "cut": "cut", "broken": "broken", "told": "told", "full": "full"}
# Case -> the code with which the router refuses its requests. Their tenant is the case, or begins with it.
REFUSED = {"busy": 8, "outage": 14}
_CASE = re.compile(rb"answer as in case ([\w-]+)")
# Of vLLM 0.32 for a prompt over the context.
VLLM_FULL = (
    "This model's maximum context length is 100 tokens. However, your prompt contains at least 101 input tokens, which exceeds "
    "this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=101)"
)
OPENAI_FULL = "Your input exceeds the context window of this model. Please adjust your input and try again."
ANTHROPIC_FULL = "prompt is too long: 210000 tokens > 200000 maximum"
# Case -> status at OpenAI and at Anthropic, the error's type and code, and the text.
_PROVIDERS: dict[str, tuple[int, int, str, str | None, str]] = {
    "outage": (503, 529, "overloaded_error", None, "Overloaded"),
    "error": (500, 500, "api_error", None, "Internal server error"),
    "bad": (400, 400, "invalid_request_error", None, "no"),
    "full": (400, 400, "invalid_request_error", "context_length_exceeded", OPENAI_FULL),
}
_LIMITED = (429, 429, "rate_limit_error", "rate_limit_exceeded", "Not now.")


def prompt_of(case: str) -> str:
    """Return a prompt that is answered as in a case. What follows the case's first word tells its requests from others."""
    return f"Please answer as in case {case}"


def case_of(raw: bytes) -> str:
    """Return the case that a body names; "" for none."""
    found = _CASE.search(raw)
    return found[1].decode() if found else ""


def _error(path: str, type_: str, message: str, **openais: object) -> dict[str, object]:
    if "/messages" in path:
        return {"type": "error", "error": {"type": type_, "message": message}}
    return {"error": {"type": type_, "message": message, **openais}}


class EngineByPrompt(FakeEngine):
    """An engine whose mode is that of the prompt's case. Counts the requests of each case in `asked`."""

    @property
    def asked(self) -> Counter[str]:
        return Counter(case_of(json.dumps(body).encode()) for _, body, _ in self.requests)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        case = case_of(await request.read())
        this = copy.copy(self)
        this.mode = MODES[case.partition("-")[0]]
        if this.mode == "full":
            self.requests.append((request.path, await request.json(), dict(request.headers)))
            error = _error(request.path, "BadRequestError", VLLM_FULL, param="input_tokens", code=400)
            return web.json_response(error, status=400)
        return await FakeEngine.generate(this, request)


@dataclass
class Provider:
    """Answers as OpenAI and Anthropic do where something is wrong: beyond a rate limit, unless the case is another one. The case
    is the first word of the path, or else the prompt's."""

    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)

    async def answer(self, request: web.Request) -> web.Response:
        case = case_of(await request.read())
        self.asked[case] += 1
        word = request.path.split("/")[1]
        word = case.partition("-")[0] if word == "v1" else word
        openais, anthropics, type_, code, message = _PROVIDERS.get(word, _LIMITED)
        by_anthropic = request.path.endswith("/messages")
        if by_anthropic and word == "full":
            message = ANTHROPIC_FULL
        error = _error(request.path, type_, message, param=None, code=code)
        headers = {} if word in ("bad", "full") else {"Retry-After": "1"}
        return web.json_response(error, status=anthropics if by_anthropic else openais, headers=headers)


@asynccontextmanager
async def providers() -> AsyncIterator[Provider]:
    """Run the providers' emulation."""
    provider = Provider()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{any:.*}", provider.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    provider.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield provider
    finally:
        await runner.cleanup()


@asynccontextmanager
async def stack_by_prompt(folder: Path, keys: str, **more: Any) -> AsyncIterator[Stack]:
    """Run a gateway with keys before engines by prompt, and a router that refuses the requests of the tenants of REFUSED."""
    file = folder / "keys"
    file.write_text(keys)
    async with stack(folder, engine=EngineByPrompt, api_keys_file=file, **more) as up:
        first = up.router.placer

        def placed(asked: Any) -> Any:
            code = REFUSED.get(asked.tenant.partition("-")[0])
            return first(asked) if code is None else refusal(asked, code, "no", 1)

        up.router.placer = placed
        yield up
