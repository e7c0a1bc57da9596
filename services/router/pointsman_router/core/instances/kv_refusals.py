"""Which instances refuse KV from which others, because KV of those was wrong there. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pointsman_router.core.placement_types import InstanceInfo


def refused_senders(infos: Iterable[InstanceInfo]) -> dict[str, list[str]]:
    """Return the ids of the instances that refuse others -> the ids of those others, in the order of `infos`.

    Engines that have ended are not among them, so nothing is refused any more when the sender is another process. The time is
    linear in the instances, their refusals, and the result.
    """
    known = [(info.instance_id, info.kv_transfer) for info in infos if info.kv_transfer is not None]
    refusing = [(name, kv.refused) for name, kv in known if kv.wrong_from]
    if not refusing:
        return {}
    by_engine: dict[str, list[int]] = {}
    for number, (_, kv) in enumerate(known):
        for key in (kv.engine_id, kv.bootstrap_url):
            if key:
                by_engine.setdefault(key, []).append(number)
    found = {}
    for name, refused in refusing:
        senders = {number for key in (*refused.engines, *refused.urls) for number in by_engine.get(key, ())}
        found[name] = [
            known[number][0]
            for number in sorted(senders)
            if refused.refuses(known[number][1].engine_id, known[number][1].bootstrap_url) and known[number][0] != name
        ]
    return {name: senders for name, senders in found.items() if senders}
