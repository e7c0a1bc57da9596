"""The benchmark of hit rates with tampered KV events, with a few questions."""

from __future__ import annotations

import pytest

from bench import events


@pytest.mark.parametrize(("case", "said"), [("right", "EVENTS"), ("none", "APPROXIMATE")])
async def test_questions_are_asked_and_hits_are_counted(case: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "DOCUMENTS", 2)
    monkeypatch.setattr(events, "QUESTIONS", 4)
    run = await events._run(case)
    assert 0 < run.cached < run.prompt
    assert any(what.startswith(said) for what in run.said), run.said
