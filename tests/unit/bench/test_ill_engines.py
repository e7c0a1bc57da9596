"""The page of ill engines is that of the saved runs, which have every way."""

from __future__ import annotations

from bench.ill_engines import OLD_RESULTS, PAGE, RESULTS, page, saved
from bench.ill_fleet import ENGINES
from bench.ill_ways import WAYS


def test_the_page_shows_the_saved_runs() -> None:
    assert PAGE.read_text() == page(saved(RESULTS), saved(OLD_RESULTS))


def test_each_way_was_run_with_both_pools_at_both_versions() -> None:
    rows = [(way.name, pool) for way in WAYS for pool in ENGINES]
    assert [(outcome.way, outcome.pool) for outcome in saved(RESULTS)] == rows
    assert [(outcome.way, outcome.pool) for outcome in saved(OLD_RESULTS)] == rows
    assert len(WAYS) >= 24
