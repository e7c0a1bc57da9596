"""Long work in a thread pauses often, for the event loop to go first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from pointsman_gateway.core.api import Endpoint, estimated_tokens, parse
from pointsman_gateway.core.api.decode_body import PIECE_BYTES, decode_body
from pointsman_gateway.core.pauses import ITEMS, paced, pause, set_pause
from pointsman_gateway.core.tenants import ANYONE
from pointsman_gateway.core.tokens.chat_template import ChatTemplate
from pointsman_gateway.io.request import threaded_preparer
from pointsman_gateway.io.request.threaded_preparer import GIVEN_S, REST_S, WORK_S, GivesWay, _Threads

COUNT = 20_000
LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
PLAIN = "{{ messages[0].content }}"
INDENTED = "{{ tools | tojson(indent=2) }}"


@pytest.fixture
def paused() -> Iterator[list[None]]:
    found: list[None] = []
    set_pause(lambda: found.append(None))
    yield found
    set_pause(None)


def body_of(field: str = "messages") -> dict[str, Any]:
    return {"model": "m", "max_tokens": 1, field: [{"role": "user", "content": "points"}] * COUNT}


def pauses_of(paused: list[None], work: Callable[[], object]) -> int:
    paused.clear()
    work()
    return len(paused)


def test_items_are_paced_only_where_there_is_a_pause(paused: list[None]) -> None:
    items = list(range(3 * ITEMS + 1))
    assert list(paced(items)) == items
    assert len(paused) == 3
    set_pause(None)
    assert paced(items) is items
    pause()
    assert len(paused) == 3


def test_decoding_pauses_at_each_piece(paused: list[None]) -> None:
    raw = json.dumps(body_of()).encode()
    assert pauses_of(paused, lambda: decode_body(raw)) >= len(raw) // PIECE_BYTES


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [(Endpoint.CHAT, "messages"), (Endpoint.MESSAGES, "messages"), (Endpoint.RESPONSES, "input")],
)
def test_checking_and_counting_pause_at_the_messages(paused: list[None], endpoint: Endpoint, field: str) -> None:
    raw = json.dumps(body_of(field)).encode()
    decoding = pauses_of(paused, lambda: decode_body(raw))
    assert pauses_of(paused, lambda: parse(endpoint, raw)) >= decoding + COUNT // ITEMS
    call = parse(endpoint, raw)
    assert pauses_of(paused, lambda: estimated_tokens(call)) >= COUNT // ITEMS


@pytest.mark.parametrize(("source", "times"), [(LOOP, 2), (PLAIN, 1)])
def test_rendering_pauses_at_the_messages_and_at_the_templates_steps(
    paused: list[None], source: str, times: int
) -> None:
    template = ChatTemplate(source, {}, datetime.now)
    assert pauses_of(paused, lambda: template.render(body_of())) >= times * (COUNT // ITEMS)


def test_writing_json_pauses_at_its_parts(paused: list[None]) -> None:
    template = ChatTemplate(INDENTED, {}, datetime.now)
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [0] * COUNT}}}],
    }
    assert pauses_of(paused, lambda: template.render(body)) >= COUNT // 256


class Clock:
    """Stands for `time`: sleeping takes `late` more than asked, as if the interpreter were with another thread."""

    def __init__(self) -> None:
        self.now, self.late, self.slept = 0.0, 0.0, list[float]()

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.late


@pytest.mark.parametrize("busy", [True, False])
def test_a_thread_rests_while_the_event_loop_has_work(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    clock = Clock()
    monkeypatch.setattr(threaded_preparer, "time", clock)
    gives_way = GivesWay()
    clock.now = WORK_S / 2
    gives_way()
    assert clock.slept == []
    clock.now, clock.late = WORK_S, 2 * GIVEN_S * busy
    gives_way()
    assert (len(clock.slept), REST_S in clock.slept) == ((2, True) if busy else (1, False))
    gives_way()
    assert len(clock.slept) == 1 + busy, "it has just begun again"


async def test_threads_of_the_gateway_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GivesWay] = []
    monkeypatch.setattr(GivesWay, "__call__", lambda self: seen.append(self))
    threads = _Threads(1, "test")
    try:
        await threads.run(ANYONE, pause)
    finally:
        threads.close()
    assert len(seen) == 1
    pause()
    assert len(seen) == 1, "the event loop does not"
