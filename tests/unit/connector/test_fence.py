"""A layer's bytes may leave when its own work is done, whatever is queued behind it."""

from __future__ import annotations

from pointsman_connector.layerwise.fence import marker


class Stream:
    """An accelerator's queue: work is done when `advance` gets to it."""

    def __init__(self) -> None:
        self.queued = self.done = 0
        self.waits: list[int] = []

    def event(self) -> Mark:
        return Mark(self)


class Mark:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.at = -1

    def record(self) -> None:
        self.at = self._stream.queued

    def synchronize(self) -> None:
        assert self.at >= 0, "waited for before it was recorded"
        self._stream.waits.append(self.at)
        self._stream.done = max(self._stream.done, self.at)


def test_each_layer_has_a_mark_of_its_own() -> None:
    stream = Stream()
    mark = marker(stream.event)
    fences = []
    for _ in range(3):
        stream.queued += 1
        fences.append(mark())
    assert stream.waits == [], "marking does not wait"
    assert fences[0] is not None
    fences[0]()
    assert (stream.waits, stream.done) == ([1], 1), "the later layers may still be computed"
    assert fences[2] is not None
    fences[2]()
    assert stream.done == 3


def test_a_cpu_has_nothing_to_wait_for() -> None:
    assert marker(None)() is None
