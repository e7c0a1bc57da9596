"""A transfer is marked from the step that may reuse its blocks until the loop has processed that step."""

from __future__ import annotations

from pointsman_connector.layerwise.overwrites import OverwriteMarks


def test_a_mark_lasts_until_it_is_processed() -> None:
    marks = OverwriteMarks()
    assert "t" not in marks
    marks.mark(["t"])
    assert "t" in marks
    marks.mark(["t"])
    marks.clear("t")
    assert "t" in marks, "of two marks one is not processed yet"
    marks.clear("t")
    assert "t" not in marks


def test_only_what_is_processed_is_forgotten() -> None:
    marks = OverwriteMarks()
    marks.mark(["t"])
    marks.forget("t")
    assert "t" in marks
    marks.clear("t")
    marks.forget("t")
    assert len(marks) == 0
    marks.mark(["t"])
    assert "t" in marks, "the same name counts from the beginning"
