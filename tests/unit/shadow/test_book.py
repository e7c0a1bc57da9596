"""Requests come out in the order of their arrival, once it is known how they ended."""

from __future__ import annotations

import math

from lab.counterfactual import Observed
from services.shadow.book import Asked, Book, Ended


def asked(name: str, at: float, *, tokens: int = 40, keys: tuple[int, ...] = (7, 8), most: int = 0) -> Asked:
    return Asked(name, at, "m", "s", tokens, keys, most)


def names(found: list[Observed]) -> list[str]:
    return [one.request_id for one in found]


def test_a_request_waits_for_its_end_and_for_those_before_it() -> None:
    book = Book(100.0, 200)
    book.add(asked("a", 1.0))
    book.add(asked("b", 2.0))
    assert book.end("b", Ended(200, "i:1", 5, 32))
    assert names(list(book.due(3.0, 3.0))) == []
    assert book.end("a", Ended(200))
    assert not book.end("a", Ended(200))
    first, second = book.due(3.0, 3.0)
    assert (first.request_id, first.instance, first.output_length, first.output_known) == ("a", "", 200, False)
    assert (second.instance, second.output_length, second.output_known, second.cached_tokens) == ("i:1", 5, True, 32)
    assert second.turn == first.turn + 1
    assert len(book) == 0


def test_nothing_is_told_while_an_earlier_one_may_still_become_known() -> None:
    """A log has a request when it ends: one that came before may be in a later line."""
    book = Book(100.0, 200)
    book.add(asked("late", 50.0), Ended(200))
    assert names(list(book.due(60.0, -40.0))) == []
    book.add(asked("early", 10.0), Ended(200))
    assert names(list(book.due(151.0, 51.0))) == ["early", "late"]


def test_one_whose_end_never_comes_is_taken_as_it_is() -> None:
    book = Book(10.0, 200)
    book.add(asked("lost", 1.0, most=16))
    assert names(list(book.due(10.9, 10.9))) == []
    (found,) = book.due(11.0, 11.0)
    assert (found.instance, found.output_length) == ("", 16)
    assert not book.end("lost", Ended(200))


def test_failures_are_counted_only() -> None:
    book = Book(10.0, 200)
    book.add(asked("a", 1.0), Ended(502))
    assert list(book.due(math.inf, math.inf)) == []
    assert book.failed == 1


def test_what_has_no_keys_shares_nothing() -> None:
    book = Book(10.0, 200)
    book.add(asked("a", 1.0, tokens=64), Ended())
    book.add(asked("b", 2.0, tokens=64, keys=()), Ended())
    book.add(asked("c", 3.0, tokens=64, keys=()), Ended())
    one, two, three = book.due(math.inf, math.inf)
    assert one.hash_ids[:2] == (7, 8)
    assert [len(found.hash_ids) for found in (one, two, three)] == [4, 4, 4]
    assert len({*one.hash_ids, *two.hash_ids, *three.hash_ids}) == 12
    assert (one.keyed, two.keyed) == (True, False)


def test_an_end_may_be_known_before_its_request() -> None:
    book = Book(10.0, 200)
    assert not book.end("a", Ended(200, "i:1"), follows=True)
    assert not book.end("b", Ended(200, "i:1"))
    book.add(asked("a", 1.0))
    book.add(asked("b", 2.0))
    (found,) = book.due(3.0, 3.0)
    assert found.instance == "i:1"
