"""What the demo says of instances that got nothing."""

from __future__ import annotations

from pointsman_lab.live.demo_command import idle_words
from pointsman_lab.report.request_record import RequestRecord


def answered(at: float, instance: str, cached: int) -> RequestRecord:
    return RequestRecord(session="s", turn=1, instance=instance, t_send=at, e2e_s=1.0, cached_tokens=cached)


def test_an_idle_instance_is_named_with_the_figures_that_tell_why() -> None:
    records = [answered(0.0, "a", 0), answered(0.5, "b", 64), answered(1.2, "a", 64), answered(5.0, "a", 64)]
    assert idle_words(records, ["a", "b", "c", "d"]) == (
        "c, d got none: at most 2 requests were open at a time, and 3 of 4 found a part of their prompt cached where they went"
    )
    assert idle_words(records, ["a", "b"]) == ""
