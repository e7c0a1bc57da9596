"""Which begun answers a gateway tells routers to stand still."""

from __future__ import annotations

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.io.routing.router_client import OpenAnswer, _Request


def test_an_answer_that_stands_still_is_told_unless_its_client_reads_slowly() -> None:
    tokens, waits = 0, True
    one = _Request(placement_pb2.PlacementRequest(), 0.0)
    assert one.progress(0.0) == (False, False), "no answer has begun"
    one.open_answer = OpenAnswer(lambda: tokens, lambda: waits, lambda: 0.0)
    tokens = 3
    assert one.progress(2.0) == (True, False)
    assert [one.progress(2.0 + second)[1] for second in (8, 10, 28, 30)] == [False, True, True, False]
    tokens = 4
    assert one.progress(40.0) == (True, False)
    waits = False
    assert not any(any(one.progress(40.0 + second)) for second in (10, 20))
    waits = True
    assert not any(one.progress(69.0))
    assert one.progress(70.0) == (False, True)
