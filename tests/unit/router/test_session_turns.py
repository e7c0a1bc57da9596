"""What decisions tell of sessions."""

from __future__ import annotations

import random
from typing import Any

from msgspec.structs import replace

from pointsman_router.core.analysis.session_turns import SessionTurns, Turns
from pointsman_router.core.events_and_effects import Finished
from pointsman_router.core.placement_types import Decision
from pointsman_router.core.policy.base import decide
from pointsman_router.core.policy.registry import make_policy
from tests.support.router_values import candidate, request, view


def decision(tokens: int, cached: int, session: str = "s", exclude: tuple[str, ...] = (), **changes: Any) -> Decision:
    asked = request("r", tokens=tokens, session_id=session, tenant="t", exclude=exclude)
    seen = view(candidate("a", new=tokens - cached, cached=cached))
    return replace(decide(make_policy("lmetric"), asked, "m", seen, random.Random(0), "d"), **changes)


def ended(cached: int | None) -> Finished:
    return Finished("r", "OK", cached_tokens=cached)


def counted(*decisions: tuple[Decision, Finished | None]) -> Turns:
    turns = SessionTurns([("m", "t/s"), ("other", "t/s")])
    for decision, finished in decisions:
        turns.add(decision, finished)
    assert turns.of("other", "t/s") == Turns()
    return turns.of("m", "t/s")


def test_turns_are_counted_with_the_engine_s_figure_where_it_reported_one() -> None:
    newest = decision(500, 400), None
    assert counted(newest) == Turns(1, 500, 400, 500)
    earlier = [(decision(300, 200), ended(96)), (decision(100, 0), ended(None)), (decision(99, 0, "another"), ended(9))]
    assert counted(newest, *earlier) == Turns(3, 900, 400 + 96, 500)


def test_no_more_is_cached_than_there_is() -> None:
    assert counted((decision(100, 0), ended(1_000))) == Turns(1, 100, 100, 100)


def test_what_is_placed_anew_or_in_parts_is_one_turn() -> None:
    retried = decision(100, 64, exclude=("b",)), ended(64)
    later_part = decision(100, 96, previous_id="d0"), ended(96)
    assert counted(retried, later_part, (decision(100, 32), None)) == Turns(1, 100, 32, 100)


def test_of_an_offload_the_prediction_stands() -> None:
    assert counted((decision(100, 32, mode="OFFLOAD"), ended(100))) == Turns(1, 100, 32, 100)
