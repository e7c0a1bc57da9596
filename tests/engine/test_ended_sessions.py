"""The connector package's cache policy in vLLM's CPU offloading tier: what belongs to ended sessions is evicted first."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.vllm_questions import Vllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

HITS = "import vllm_ended_sessions; answer = vllm_ended_sessions.hits(**asked)"
STORY = "import vllm_ended_sessions; answer = vllm_ended_sessions.story(**asked)"
PLAY = "import vllm_offload; answer = vllm_offload.play(**asked)"
BLOCK = 32
LAST = {"pointsman_session_end": True}


def chain(text: str) -> list[str]:
    """The chunks of a prompt; each name has those before it."""
    return list(accumulate(text))


def sessions(draw: random.Random, at_once: int, requests: int, system: int = 10) -> list[dict[str, Any]]:
    """Requests of agents' sessions, `at_once` of them under way: every prompt begins with the same chunks, then with those of its
    session, which grow with each turn."""
    made: list[dict[str, Any]] = []
    under_way: list[dict[str, Any]] = []
    for number in range(requests):
        if len(under_way) < at_once:
            under_way.append({"name": number, "length": 0, "turns": draw.randint(3, 12)})
        session = draw.choice(under_way)
        session["length"] += draw.randint(2, 8)
        session["turns"] -= 1
        own = [f"{session['name']}-{at}" for at in range(session["length"])]
        made.append({"words": [f"system-{at}" for at in range(system)] + own, "last": not session["turns"]})
        if not session["turns"]:
            under_way.remove(session)
    return made


def test_what_belongs_to_an_ended_session_is_evicted_before_older_chunks(vllm: Vllm) -> None:
    requests = [
        {"words": chain("sab"), "last": False},
        {"words": chain("sxy"), "last": False},
        {"words": chain("sxyz"), "last": True},
        {"words": chain("qr"), "last": False},
        {"words": chain("sab"), "last": False},
    ]
    asked = {"chunks": 6, "requests": requests}
    assert vllm.ask(HITS, asked | {"policy": "ended_first"}) == [0, 1, 3, 0, 3]
    assert vllm.ask(HITS, asked | {"policy": "lru"}) == [0, 1, 3, 0, 1]


def test_a_session_that_goes_on_after_its_end_has_its_chunks_back(vllm: Vllm) -> None:
    requests = [
        {"words": chain("ab"), "last": True},
        {"words": chain("abc"), "last": False},
        {"words": chain("x"), "last": False},
        {"words": chain("yz"), "last": True},
        {"words": chain("pq"), "last": False},
        {"words": chain("abc"), "last": False},
    ]
    assert vllm.ask(HITS, {"policy": "ended_first", "chunks": 6, "requests": requests}) == [0, 2, 0, 0, 0, 3]


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_requests_is_carried_out(vllm: Vllm, seed: int) -> None:
    """Chunks in use are never evicted, no more are kept than there is room for, and nothing is remembered of chunks that are
    gone."""
    draw, chunks = random.Random(seed), 12
    words = sorted({word for _ in range(30) for word in chain("".join(draw.choices("ab", k=draw.randint(1, 6))))})
    actions: list[list[Any]] = []
    under_way: list[str] = []
    for number in range(300):
        kind = draw.random()
        if kind < 0.02:
            actions.append(["reset"])
            under_way.clear()
        elif under_way and (kind < 0.5 or len(under_way) > 3):
            name = under_way.pop(draw.randrange(len(under_way)))
            actions.append(["end", name, draw.random() < 0.9])
        else:
            under_way.append(str(number))
            actions.append(["begin", str(number), chain(draw.choice(words)), draw.random() < 0.3])
    for policy in ("ended_first", "lru"):
        states = vllm.ask(STORY, {"policy": policy, "chunks": chunks, "actions": actions, "words": words})
        for state in states:
            assert set(state["in_use"]) <= set(state["kept"])
            assert max(len(state["kept"]), state["own"]) <= chunks
            assert all(key not in state["kept"] for removed, keys in state["events"][-1:] if removed for key in keys)


@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
def test_sessions_that_go_on_hit_more_when_ended_ones_are_evicted_first(vllm: Vllm, share: float) -> None:
    """`share`: the chunks that there is room for, of those of the sessions under way."""
    for seed in range(5):
        requests = sessions(random.Random(seed), at_once=40, requests=3_000)
        lengths = [len(request["words"]) for request in requests]
        chunks = int(share * 40 * sum(lengths) / len(lengths))
        ratios = {}
        for policy in ("lru", "ended_first"):
            found = vllm.ask(HITS, {"policy": policy, "chunks": chunks, "requests": requests})
            ratios[policy] = sum(found) / sum(lengths)
        print(f"room for {share:.0%}, seed {seed}: hit ratio {ratios['lru']:.3f} -> {ratios['ended_first']:.3f}")
        assert ratios["ended_first"] > ratios["lru"]


def test_vllms_scheduler_passes_the_mark_of_a_last_request_to_the_policy(vllm: Vllm, model_folder: Path) -> None:
    def prompt(letters: str, last: bool = False) -> dict[str, Any]:
        tokens = [ord(letter) * 5 + at % 5 for letter in letters for at in range(BLOCK)] + [9]
        return {"kind": "prompt", "prompt": tokens} | ({"params": LAST} if last else {})

    asked: dict[str, Any] = {
        "connector": "OffloadingConnector",
        "blocks_per_chunk": 1,
        "self_describing": False,
        "kv_blocks": 8,
        "cpu_chunks": 7,
    }
    actions = [prompt("sab"), prompt("sxyz"), prompt("sxyzw", last=True), prompt("pq")]
    kept = {}
    for policy, settings in (
        ("lru", {}),
        ("ended", {"eviction_policy": "EndedFirst", "cache_policy_module_path": "pointsman_connector.ended_first"}),
    ):
        steps = vllm.ask(
            PLAY, {"model": str(model_folder), "asked": asked | {"settings": settings}, "actions": actions}
        )
        kept[policy] = ["".join("+" if host else "-" for _, host in prompt) for prompt in steps[-1]["blocks"]]
    assert kept["ended"][0] == "+++", "the session that goes on"
    assert kept["ended"][2] == "+++--", "the tail of the ended one made room"
    assert kept["lru"][0] != "+++"
