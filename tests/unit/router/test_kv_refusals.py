"""Who refuses whom: found by tables, and the same as by asking each pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman_router.core.instances.kv_refusals import refused_senders
from pointsman_router.core.placement_types import InstanceInfo, KvTransfer, WrongKv
from tests.support.router_values import info

ids, urls = st.sampled_from(["", "e1", "e2", "e3"]), st.sampled_from(["", "http://p", "http://q"])


def refuses(wrong: WrongKv, sender: KvTransfer) -> bool:
    """The rule for one refusal."""
    if wrong.engine_id and sender.engine_id:
        return wrong.engine_id == sender.engine_id
    return wrong.bootstrap_url == sender.bootstrap_url != ""


@st.composite
def fleets(draw: st.DrawFn) -> list[InstanceInfo]:
    kinds = st.builds(
        KvTransfer,
        st.just("MOONCAKE"),
        bootstrap_url=urls,
        wrong_from=st.lists(st.builds(WrongKv, urls, ids, st.just(1)), max_size=3).map(tuple),
        engine_id=ids,
    )
    transfers = draw(st.lists(st.none() | kinds, max_size=6))
    return [info(str(number), kv_transfer=kv) for number, kv in enumerate(transfers)]


@given(fleets())
def test_refused_senders_are_those_of_each_pair(fleet: list[InstanceInfo]) -> None:
    expected: dict[str, list[str]] = {}
    for receiver in fleet:
        for sender in fleet:
            if receiver is sender or receiver.kv_transfer is None or sender.kv_transfer is None:
                continue
            refused = any(refuses(refusal, sender.kv_transfer) for refusal in receiver.kv_transfer.wrong_from)
            one = sender.kv_transfer
            assert receiver.kv_transfer.refused.refuses(one.engine_id, one.bootstrap_url) == refused
            if refused:
                expected.setdefault(receiver.instance_id, []).append(sender.instance_id)
    assert refused_senders(fleet) == expected
