"""No schedule of calls passes more than the rate, and no tenant slows another one down."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from pointsman_gateway.core.tenant_pace import TenantPace


@example(per_s=5.0, at_once=2, pauses=[(0.0, "a"), (0.0, "a")])
@example(per_s=5.0, at_once=1, pauses=[(0.0, "a"), (0.0, "b")])
@given(
    per_s=st.floats(0.5, 100),
    at_once=st.integers(1, 20),
    pauses=st.lists(st.tuples(st.floats(0, 3), st.sampled_from("ab")), max_size=80),
)
def test_a_tenant_calls_at_its_rate_and_waits_as_long_as_it_is_told(
    per_s: float, at_once: int, pauses: list[tuple[float, str]]
) -> None:
    pace, now = TenantPace(per_s, at_once), 100.0
    taken: dict[str, list[float]] = {"a": [], "b": []}
    for pause, tenant in pauses:
        now += pause
        if wait := pace.take(tenant, now):
            assert len(taken[tenant]) >= at_once
            assert 0 < wait <= 1 / per_s + 1e-6
            assert pace.take(tenant, now + wait + 1e-6) == 0
            now += wait + 1e-6
        taken[tenant].append(now)
    for times in taken.values():
        for first, begun in enumerate(times):
            for last in range(first, len(times)):
                assert last - first + 1 <= at_once + (times[last] - begun) * per_s + 1e-3
