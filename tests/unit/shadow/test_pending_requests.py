"""Requests come out in the order of their arrival, once it is known how they ended."""

from __future__ import annotations

import math

from pointsman_lab.simulation.counterfactual import ObservedRequest
from pointsman_shadow.core.pending_requests import ArrivedRequest, PendingRequests, RequestOutcome


def asked(name: str, at: float, *, tokens: int = 40, keys: tuple[int, ...] = (7, 8), most: int = 0) -> ArrivedRequest:
    return ArrivedRequest(name, at, "m", "s", tokens, keys, most)


def names(found: list[ObservedRequest]) -> list[str]:
    return [request.request_id for request in found]


def test_a_request_waits_for_its_end_and_for_those_before_it() -> None:
    pending = PendingRequests(100.0, 200)
    pending.add(asked("a", 1.0))
    pending.add(asked("b", 2.0))
    assert pending.end("b", RequestOutcome(200, "i:1", 5, 32))
    assert names(list(pending.due(3.0, 3.0))) == []
    assert pending.end("a", RequestOutcome(200))
    assert not pending.end("a", RequestOutcome(200))
    first, second = pending.due(3.0, 3.0)
    assert (first.request_id, first.instance, first.output_length, first.output_known) == ("a", "", 200, False)
    assert (second.instance, second.output_length, second.output_known, second.cached_tokens) == ("i:1", 5, True, 32)
    assert second.turn == first.turn + 1
    assert len(pending) == 0


def test_nothing_is_reported_while_an_earlier_one_may_still_become_known() -> None:
    """A log line is written when its request ends, so an earlier request may be in a later line."""
    pending = PendingRequests(100.0, 200)
    pending.add(asked("late", 50.0), RequestOutcome(200))
    assert names(list(pending.due(60.0, -40.0))) == []
    pending.add(asked("early", 10.0), RequestOutcome(200))
    assert names(list(pending.due(151.0, 51.0))) == ["early", "late"]


def test_one_whose_end_never_comes_is_taken_as_it_is() -> None:
    pending = PendingRequests(10.0, 200)
    pending.add(asked("lost", 1.0, most=16))
    assert names(list(pending.due(10.9, 10.9))) == []
    (found,) = pending.due(11.0, 11.0)
    assert (found.instance, found.output_length) == ("", 16)
    assert not pending.end("lost", RequestOutcome(200))


def test_failures_are_counted_only() -> None:
    pending = PendingRequests(10.0, 200)
    pending.add(asked("a", 1.0), RequestOutcome(502))
    assert list(pending.due(math.inf, math.inf)) == []
    assert pending.failed == 1


def test_what_has_no_keys_shares_nothing() -> None:
    pending = PendingRequests(10.0, 200)
    pending.add(asked("a", 1.0, tokens=64), RequestOutcome())
    pending.add(asked("b", 2.0, tokens=64, keys=()), RequestOutcome())
    pending.add(asked("c", 3.0, tokens=64, keys=()), RequestOutcome())
    one, two, three = pending.due(math.inf, math.inf)
    assert one.hash_ids[:2] == (7, 8)
    assert [len(found.hash_ids) for found in (one, two, three)] == [4, 4, 4]
    assert len({*one.hash_ids, *two.hash_ids, *three.hash_ids}) == 12
    assert (one.keyed, two.keyed) == (True, False)


def test_an_end_may_be_known_before_its_request() -> None:
    pending = PendingRequests(10.0, 200)
    assert not pending.end("a", RequestOutcome(200, "i:1"), follows=True)
    assert not pending.end("b", RequestOutcome(200, "i:1"))
    pending.add(asked("a", 1.0))
    pending.add(asked("b", 2.0))
    (found,) = pending.due(3.0, 3.0)
    assert found.instance == "i:1"
