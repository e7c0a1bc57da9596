"""A short run of the soak of bench/soak.py."""

from __future__ import annotations

from bench import soak

REQUESTS, BY = 5_000, 500


async def test_many_requests_leave_nothing_open_and_little_behind() -> None:
    """Caches that stay full later are still filling here, so memory grows: by 22 to 26 MB in the
    router that places. `python -m bench soak` gives better figures."""
    figures = await soak.run(REQUESTS, BY)
    assert {figure.metric.removeprefix("soak_growth_mb_100k_") for figure in figures} == {
        *("redis", "r0", "r1", "a0", "a1", "e0", "e1", "e2", "gateway_0", "gateway_1")
    }
    grown = {figure.metric: figure.value * REQUESTS / 100_000 for figure in figures}
    assert max(grown.values()) < 35, grown
