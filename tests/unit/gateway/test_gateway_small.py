"""The gateway's smaller parts: streams on their way, settings."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.gateway.answer import TAIL_BYTES, Tail
from services.gateway.dialects import Kind
from services.gateway.dialects.endings import Ending, Usage
from services.gateway.events import MAX_HELD_BYTES, EventStream
from services.gateway.settings import GatewaySettings

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def stream(*events: object, done: bool = True) -> bytes:
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return (text + ("data: [DONE]\n\n" if done else "")).encode()


def cut_up(whole: bytes, cuts: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for cut in [*cuts, len(whole)]:
        pieces.append(whole[at : at + cut])
        at += cut
    return [piece for piece in pieces if piece]


WORDS = st.integers(0, 50)
CUTS = st.lists(st.integers(1, 400), max_size=60)


@given(CUTS, WORDS, st.booleans())
def test_usage_is_found_however_the_stream_is_cut(cuts: list[int], words: int, ours: bool) -> None:
    said = [{"choices": [{"delta": {"content": 'w"usage"' * 30}}]} for _ in range(words)]
    whole = stream(*said, {"choices": [], "usage": USAGE})
    tail = Tail(Kind.CHAT)
    events = EventStream(tail, withhold_usage=ours)
    out = [events.feed(piece) for piece in cut_up(whole, cuts)]
    assert tail.ending() == Ending(True, Usage(7, 4, 3))
    assert tail.events == words + 2
    assert b"".join(out) == (stream(*said) if ours else whole)
    assert all(piece == b"" or piece.endswith(b"\n\n") for piece in out)
    assert tail._size <= TAIL_BYTES + max(map(len, cut_up(whole, cuts))) + 400


def test_only_whole_events_go_out_until_one_is_too_long_to_wait_for() -> None:
    events = EventStream(Tail(Kind.CHAT))
    assert events.feed(b'data: {"a"') == b""
    assert events.feed(b": 1}\r\n\r\ndata") == b'data: {"a": 1}\r\n\r\n'
    long = b"x" * MAX_HELD_BYTES
    assert events.feed(long) == b"data" + long
    assert events.torn
    assert events.feed(b"y") == b"y"
    assert events.feed(b"z\n\n") == b"z\n\n"
    assert not events.torn
    assert events.feed(b"data: [DONE]\n") == b""
    assert events.rest() == b"data: [DONE]\n"
    assert events.torn


def test_an_early_end_and_an_engines_own_error_are_seen() -> None:
    tail = Tail(Kind.CHAT)
    tail.add(stream({"choices": []}, done=False))
    assert tail.ending().complete is False
    tail.add(stream({"error": {"message": "dead"}}))
    assert tail.ending() == Ending(True, Usage(), "the engine reported an error")
    assert tail.events == 3
    assert Tail(Kind.CHAT).ending() == Ending(False)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_GATEWAY_ROUTERS", "a:1, b:2")
    monkeypatch.setenv("POINTSMAN_GATEWAY_TOKENIZERS", "m=/models/m,org/n=org/n")
    monkeypatch.setenv("POINTSMAN_GATEWAY_ALIASES", "big=org/n")
    read = GatewaySettings()
    assert read.routers == ["a:1", "b:2"]
    assert read.alias_map() == {"big": "org/n"}
    assert read.tokenizer_paths() == {"m": "/models/m", "org/n": "org/n"}
    assert GatewaySettings(routers=["a:1,b:2", "c:3"]).routers == ["a:1", "b:2", "c:3"]
    assert read.gateway_id != GatewaySettings().gateway_id


@pytest.mark.parametrize(
    "wrong",
    [
        {"listen": "8080"},
        {"listen": "h:99999"},
        {"routers": []},
        {"routers": ["x"]},
        {"tokenizers": ["m"]},
        {"aliases": ["m="]},
        {"max_body_bytes": 0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(**wrong)  # type: ignore[arg-type]
