"""What a router logs: the return of what it has warned of is a warning, too."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from pointsman_router.core import events_and_effects as ev
from pointsman_router.io.router import Router
from pointsman_router.io.settings import RouterSettings


async def test_who_keeps_warnings_hears_that_an_instance_is_out_and_that_it_answers_again() -> None:
    router = Router(RouterSettings(router_id="r"))
    with capture_logs() as logged:
        router._tell_life(ev.LifeChanged("i", "m", True, "failures", "3 requests in a row failed on it"))
        router._tell_life(ev.LifeChanged("i", "m", False, "", ""))
    assert [entry["log_level"] for entry in logged] == ["warning", "warning"]


async def test_who_keeps_warnings_hears_that_the_store_is_away_and_that_it_answers_again() -> None:
    store: Any = Router(RouterSettings(router_id="r", redis_url="redis://none:1")).store
    with capture_logs() as logged:
        for _ in range(10):
            store._failures += 1
            await store._failed(ConnectionError())
        store._returned()
    assert [entry["log_level"] for entry in logged] == ["warning", "warning"]


async def test_who_keeps_warnings_hears_that_events_contradict_answers_and_that_they_agree_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = Router(RouterSettings(router_id="r"))
    distrusted = ev.EventsDistrusted("i", "4 of the last 8 answers computed blocks")
    effects = [ev.EventsTrusted("i", again=False), distrusted, ev.EventsTrusted("i", again=True)]
    monkeypatch.setattr(router.state, "handle", lambda *_: effects)
    with capture_logs() as logged:
        router.submit(ev.Tick())
    agree = "an instance's KV events agree with its answers; its prefixes are exact"
    assert [(entry["event"], entry["log_level"]) for entry in logged] == [
        (agree, "info"),
        ("an instance's KV events do not agree with its answers; its prefixes are approximate", "warning"),
        (agree, "warning"),
    ]
    assert all(entry["instance"] == "i" for entry in logged)
    assert logged[1]["reason"] == distrusted.reason
