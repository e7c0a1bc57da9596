"""Each layer is reported when its own work is done, in order, whatever is queued behind it, by a thread that only waits."""

from __future__ import annotations

import threading
from functools import partial

from pointsman_connector.layerwise.event_waiter import EventWaiter
from tests.support.waiting import until


class Stream:
    """An accelerator's queue: work is done when `advance` has come to it."""

    def __init__(self) -> None:
        self.launched = self.done = 0
        self.broken = False
        self._changed = threading.Condition()

    def event(self) -> Mark:
        return Mark(self)

    def advance(self) -> None:
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def wait(self, at: int) -> None:
        if self.broken:
            raise RuntimeError("an illegal memory access")
        with self._changed:
            self._changed.wait_for(lambda: self.done >= at)


class Mark:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._at: int | None = None

    def record(self) -> None:
        self._at = self._stream.launched

    def synchronize(self) -> None:
        assert self._at is not None, "waited for before it was recorded"
        self._stream.wait(self._at)


def has(events: list[str], number: int) -> bool:
    return len(events) == number


def test_each_layer_is_reported_when_it_is_done() -> None:
    stream, calls = Stream(), list[str]()
    waiter = EventWaiter(stream.event, lambda error: calls.append(str(error)))
    for layer in ("a", "b", "c"):
        stream.launched += 1
        waiter.after_launched(partial(calls.append, layer))
    assert calls == [], "launching does not wait"
    for number, layer in enumerate(("a", "b", "c"), 1):
        stream.advance()
        until(partial(has, calls, number), within_s=10, what=f"layer {layer}")
    assert calls == ["a", "b", "c"]
    waiter.close()


def test_what_needs_no_event_keeps_its_place() -> None:
    stream, calls = Stream(), list[str]()
    waiter = EventWaiter(stream.event, lambda error: calls.append(str(error)))
    stream.launched += 1
    waiter.after_launched(partial(calls.append, "the last layer of a step"))
    waiter.in_order(partial(calls.append, "the next step begins"))
    assert calls == []
    stream.advance()
    until(lambda: len(calls) == 2, within_s=10, what="both")
    assert calls == ["the last layer of a step", "the next step begins"]
    waiter.close()


def test_an_event_that_fails_reports_no_layer() -> None:
    stream, calls, errors = Stream(), list[str](), list[str]()
    waiter = EventWaiter(stream.event, lambda error: errors.append(str(error)))
    stream.broken = True
    waiter.after_launched(partial(calls.append, "a"))
    waiter.in_order(partial(calls.append, "b"))
    until(lambda: calls == ["b"], within_s=10, what="what follows")
    assert errors == ["an illegal memory access"]
    waiter.close()


def test_without_events_all_is_done_when_it_is_launched() -> None:
    calls = list[str]()
    waiter = EventWaiter(None, lambda error: calls.append(str(error)))
    waiter.after_launched(partial(calls.append, "a"))
    waiter.in_order(partial(calls.append, "b"))
    assert calls == ["a", "b"]
    waiter.close()
