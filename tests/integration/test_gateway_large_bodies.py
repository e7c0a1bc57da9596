"""Large bodies: they are handled outside the event loop's thread, refused early if they cannot fit, and charged to the key."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pointsman_gateway.core.api import Endpoint, decode_body, parse
from pointsman_gateway.core.request import prepare
from pointsman_gateway.core.tenants import ANYONE
from pointsman_gateway.core.tokens.chat_template import ChatTemplate
from pointsman_gateway.core.tokens.model_tokenizer import PendingPrompt
from pointsman_gateway.core.tokens.render_budget import OverBudget, RenderLimits
from pointsman_gateway.io.request import threaded_preparer
from tests.support.fakes.gateway_peers import MODEL, stack
from tests.support.gateway_requests import ask
from tests.support.waiting import eventually

PATH = Endpoint.CHAT.value
TURN = {"role": "user", "content": "set the points " * 20}
LARGE = {"model": MODEL, "messages": [TURN] * 200, "max_tokens": 4}
SMALL = LARGE | {"messages": [TURN]}
MANY = LARGE | {"messages": [{"role": "user", "content": "a"}] * 5_000}


@pytest.mark.parametrize(("body", "large"), [(LARGE, True), (SMALL, False)], ids=["large", "small"])
async def test_large_bodies_are_parsed_and_rendered_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], large: bool
) -> None:
    threads: dict[str, list[int]] = {}

    def noted(owner: Any, name: str) -> None:
        does = getattr(owner, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            threads.setdefault(name, []).append(threading.get_ident())
            return does(*args, **kwargs)

        monkeypatch.setattr(owner, name, note)

    async with stack(tmp_path) as up:
        for model in up.gateway.pools.states():
            model.pool.max_model_len = 100_000
        monkeypatch.setattr(decode_body, "LIGHT_BYTES", 0)
        noted(threaded_preparer, "parse")
        noted(ChatTemplate, "read")
        noted(prepare.RequestPreparer, "tokens")
        noted(prepare, "estimated_tokens")
        assert (await ask(up, PATH, body))[0] == 200
        # A template in the request: only the engine can count its tokens.
        assert (await ask(up, PATH, body | {"chat_template": "x"}))[0] == 200
        # The test's fake engine parses and renders in this process, too.
        here = threading.get_ident()
        assert threads.keys() == {"parse", "read", "tokens", "estimated_tokens"}
        for name, seen in threads.items():
            ours = [thread for thread in seen if thread != here] if large and name == "read" else seen
            assert ours, name
            assert all((thread != here) is large for thread in ours), name


async def test_more_messages_than_the_context_has_tokens_are_not_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack(tmp_path) as up:
        monkeypatch.setattr(ChatTemplate, "read", None)
        status, answer = await ask(up, PATH, MANY)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["param"] == "messages"
        assert up.router.places == []


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (MANY, {}, 400),
        (LARGE, {}, 400),
        (SMALL | {"max_tokens": 5_000}, {}, 400),
        (SMALL, {"X-Pointsman-Dry-Run": "1"}, 200),
    ],
    ids=["messages", "tokens", "output", "dry run"],
)
async def test_what_is_only_looked_at_is_charged(
    tmp_path: Path, body: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("red:k1 tokens_per_minute=50\nblue:k2 requests_per_minute=1\n")
    async with stack(tmp_path, api_keys_file=keys) as up:
        for key in ("k1", "k2"):
            shown = headers | {"Authorization": f"Bearer {key}"}
            assert [(await ask(up, PATH, body, **shown))[0] for _ in range(2)] == [status, 429], key
        assert all(engine.requests == [] for engine in up.engines)


INDENTED = (
    "{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}{% endfor %}"
    "{% for m in messages %}{% for n in messages[loop.index:] %}{{ n.role[:0] }}{% endfor %}{{ m.content }}{% endfor %}"
)


CONTEXT = 400_000
EVERYTHING = RenderLimits()


def with_tools(depth: int, width: int) -> dict[str, Any]:
    """Return a body whose five tools have parameters that are nested so deep, around a list of so many numbers."""
    parameters: Any = [0] * width
    for _ in range(depth):
        parameters = {"a": parameters}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return SMALL | {"messages": [{"role": "user", "content": "a"}], "tools": [tool] * 5}


@pytest.mark.parametrize(
    ("body", "status", "code", "threads"),
    [
        (with_tools(150, 1), 400, "invalid_json", []),
        (with_tools(120, 12_000), 400, "context_length_exceeded", ["thread"]),
        (with_tools(100, 1), 200, None, ["loop", "thread"]),
        (SMALL | {"messages": [{"role": "user", "content": "a"}] * 1_000}, 200, None, ["loop", "thread"]),
        (SMALL | {"messages": [{"role": "user", "content": "a"}] * 50}, 200, None, ["loop"]),
    ],
    ids=["deep", "wide", "long", "quadratic", "short"],
)
async def test_what_a_template_multiplies_is_rendered_in_a_thread_up_to_the_context(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: dict[str, Any],
    status: int,
    code: str | None,
    threads: list[str],
) -> None:
    seen: list[tuple[str, RenderLimits, int]] = []
    here, read = threading.get_ident(), ChatTemplate.read

    def noted(self: ChatTemplate, asked: Any, limits: RenderLimits = EVERYTHING) -> Any:
        if (
            replace(limits, part=0, memory=EVERYTHING.memory) == EVERYTHING
        ):  # the test's fake engine renders in this process, too
            return read(self, asked, limits)
        thread = "loop" if threading.get_ident() == here else "thread"
        try:
            rendered = read(self, asked, limits)
        except OverBudget as over:
            seen.append((thread, limits, over.characters))
            raise
        seen.append((thread, limits, len(rendered.text)))
        return rendered

    async with stack(tmp_path, template=INDENTED) as up:
        for model in up.gateway.pools.states():
            model.pool.max_model_len = CONTEXT
        monkeypatch.setattr(ChatTemplate, "read", noted)
        got, answer = await ask(up, PATH, body)
        assert (got, (answer.get("error") or {}).get("code")) == (status, code)
        assert len(up.router.places) == (status == 200)
        assert [thread for thread, _, _ in seen] == threads
        for thread, limits, length in seen:
            assert limits.light is (thread == "loop")
            # Each text that a template writes is within the limit, and so is what was there before it.
            assert length <= 2 * limits.text


async def test_large_bodies_wait_for_a_turn_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[int]()

    async def noted(size: int) -> None:
        waited.append(size)

    async with stack(tmp_path) as up:
        monkeypatch.setattr(up.gateway._preparer, "loop_turn", noted)
        large = SMALL | {"padding": "x" * threaded_preparer.COUNTED_BYTES}
        for body in (SMALL, large):
            assert (await ask(up, PATH, body))[0] == 200
    size = len(json.dumps(large))
    assert waited == [size, size], "to be decoded, and to be rendered"


async def test_only_so_many_large_bodies_are_decoded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as threads tokenise; the others wait as bytes."""
    may_end, parsed = asyncio.Event(), 0
    tokenize_by = PendingPrompt.tokenize_by

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal parsed
        parsed += 1
        return parse(*args, **kwargs)

    async def late(self: PendingPrompt, run_in_thread: Any) -> Any:
        await may_end.wait()
        return await tokenize_by(self, run_in_thread)

    async with stack(tmp_path) as up:
        monkeypatch.setattr(decode_body, "LIGHT_BYTES", 0)
        monkeypatch.setattr(decode_body, "PIECE_BYTES", 0)
        monkeypatch.setattr(threaded_preparer, "parse", counted)
        monkeypatch.setattr(PendingPrompt, "tokenize_by", late)
        most = max(2, os.cpu_count() or 1)
        asked = [asyncio.create_task(ask(up, PATH, SMALL)) for _ in range(most + 3)]
        await eventually(lambda: parsed == most, "as many are decoded as may be")
        # The thread has done all that was given to it.
        await up.gateway._preparer._large_bodies.run(ANYONE, int)
        assert parsed == most
        may_end.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * (most + 3)
        assert parsed == most + 3
