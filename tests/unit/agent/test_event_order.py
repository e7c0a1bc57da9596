"""Batches of KV events are applied once and in order, whatever is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman_agent.core.event_order import BatchAction, EventOrder


@given(st.data())
def test_any_mix_of_live_loss_and_replay_applies_each_batch_once_in_order(data: st.DataObject) -> None:
    """A publisher of 30 batches; live ones get lost at random, replays reach back to a bounded buffer."""
    lost = data.draw(st.sets(st.integers(0, 29)))
    buffer = data.draw(st.integers(1, 30))
    sequence = EventOrder()
    applied: list[int] = []
    skipped: set[int] = set()

    def take(seq: int) -> None:
        sequence.mark_applied(seq)
        applied.append(seq)

    for seq in sorted(set(range(30)) - lost):
        verdict = sequence.on_live(seq)
        if verdict is BatchAction.GAP:
            for old in range(max(sequence.applied, 0, seq + 1 - buffer), seq + 1):
                on_replayed = sequence.on_replayed(old)
                if on_replayed is BatchAction.GAP:
                    skipped.update(range(sequence.applied + 1, old))
                    sequence.skip_to(old)
                if on_replayed is not BatchAction.DUPLICATE:
                    take(old)
            verdict = sequence.on_live(seq)
            assert verdict is BatchAction.DUPLICATE
        if verdict is BatchAction.APPLY:
            take(seq)
    assert applied == sorted(set(applied))
    assert set(applied) | skipped >= set(range(30)) - lost
    assert not skipped & set(applied)


def test_a_number_that_does_not_grow_is_a_restart() -> None:
    sequence = EventOrder()
    assert sequence.on_live(0) is BatchAction.APPLY
    sequence.mark_applied(0)
    assert sequence.on_live(0) is BatchAction.RESTART
