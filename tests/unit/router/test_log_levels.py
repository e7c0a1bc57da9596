"""What a router logs: the return of what it has warned of is a warning, too."""

from __future__ import annotations

from typing import Any

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
