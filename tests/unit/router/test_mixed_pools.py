"""Pools whose engines differ: in weights, types, tokenizers and contexts, or in nothing but that two have one name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pointsman_common.core.block_keys import KEY_SCHEME, prompt_keys
from pointsman_common.core.engine_identity import EngineIdentity
from pointsman_common.core.key_report_types import Tier
from pointsman_lab.rival_policies.registry import make_policy
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.decision_replay import differences, inputs_digest, redecide
from pointsman_router.core.instances.instance_registry import RIVAL_SHOWN_S
from pointsman_router.core.instances.saturation import SaturationLimits
from pointsman_router.core.placement_types import Candidate, Decision, KvRole, KvTransfer, Load
from pointsman_router.core.prefix.lower_tiers import LowerBlocks, LowerTiers
from pointsman_router.core.router_state import RouterState, StateSettings
from pointsman_router.core.shortlist import MAX_FULL_VIEW
from tests.support.router_values import candidate, info, join, place, request, state

HALF, BRAIN = EngineIdentity("m/x", dtype="float16"), EngineIdentity("m/x", dtype="bfloat16")
PROMPT = list(range(4_800))


def decision_of(router: RouterState, now: float = 0.0, **changes: Any) -> Decision:
    answer = place(router, request(**changes), now)
    assert isinstance(answer, ev.Placed), answer
    return answer.decision


def excluded(decision: Decision) -> dict[str, str]:
    return {candidate.instance_id: candidate.excluded for candidate in decision.view.candidates}


def replayed(decision: Decision) -> None:
    """A record of the decision, read again, leads to the same one."""
    read = msgspec.json.decode(msgspec.json.encode(decision), type=Decision)
    assert inputs_digest(read) == inputs_digest(decision)
    assert differences(read, redecide(read)) == []


# ---- identity ----


@pytest.mark.parametrize(
    ("p", "d", "can"),
    [
        (HALF, BRAIN, False),
        (HALF, HALF, True),
        (EngineIdentity(), BRAIN, True),
        (EngineIdentity("m/x"), EngineIdentity("m/y"), False),
        (EngineIdentity(kv_dtype="auto"), EngineIdentity(kv_dtype="fp8"), False),
    ],
)
def test_kv_goes_only_between_engines_of_one_identity(p: EngineIdentity, d: EngineIdentity, can: bool) -> None:
    router = RouterState(make_policy("adaptive_offload", {"heavy_new_tokens": 1}), StateSettings(), router_id="t")
    transfer = KvTransfer("MOONCAKE", "http://x:8998", cache_dtype="auto")
    join(router, "d", 1, prompt_keys(PROMPT[:1_008], "m"), identity=d, kv_transfer=transfer)
    join(router, "p", 2, identity=p, kv_transfer=transfer)
    decision = decision_of(router, prompt=PROMPT)
    assert decision.mode == ("OFFLOAD" if can else "COLOCATED")
    replayed(decision)


def test_an_answer_goes_on_only_at_an_engine_of_its_identity() -> None:
    router = state()
    join(router, "a", 1, prompt_keys(PROMPT, "m"), identity=BRAIN)
    join(router, "b", 2, identity=HALF)
    decision = decision_of(router, prompt=PROMPT, resumed=True, begun_by=HALF)
    assert (decision.instance_id, excluded(decision)) == ("b", {"a": "other_identity", "b": ""})
    replayed(decision)
    # Any engine may answer a new request, and one of which nothing is known may go on.
    assert decision_of(router, request_id="new", prompt=PROMPT).instance_id == "a"
    assert decision_of(router, request_id="u", prompt=PROMPT, resumed=True).instance_id == "a"
    refused = place(router, request("n", resumed=True, begun_by=EngineIdentity("m/other")))
    assert isinstance(refused, ev.Refused)
    assert refused.code == "UNAVAILABLE"


@pytest.mark.parametrize(("other", "leaves"), [(BRAIN, False), (HALF, True)])
def test_an_answer_leaves_a_drained_engine_only_for_one_of_its_identity(other: EngineIdentity, leaves: bool) -> None:
    router = state()
    join(router, "a", 1, identity=HALF)
    place(router, request(tokens=500, movable=True))
    router.handle(ev.FirstToken("r"), 0.0)
    join(router, "b", 2, identity=other)
    effects = router.handle(ev.DrainsChanged({"a": "1"}, frozenset("a")), 1.0)
    assert any(isinstance(effect, ev.Move) for effect in effects) is leaves


def test_engines_of_other_weights_do_not_load_each_others_blocks_from_one_store() -> None:
    tiers, keys = LowerTiers(), list(range(100, 116))
    for name, identity in (("a", HALF), ("b", BRAIN), ("c", HALF), ("d", EngineIdentity())):
        tiers.share(name, "m", "s", identity)
    tiers.add(Tier.STORAGE, "a", keys)
    found = tiers.continued(keys, dict.fromkeys("abcd", 0))
    assert found == dict.fromkeys("acd", LowerBlocks(0, 16))
    tiers.check_invariants()
    tiers.share("b", "m", "s", HALF)
    assert tiers.continued(keys, dict.fromkeys("ab", 0)) == dict.fromkeys("ab", LowerBlocks(0, 16))
    tiers.check_invariants()


def test_one_engine_does_not_decide_the_tokenizer_of_all() -> None:
    router = state()
    join(router, "a", 1, model_root="/other")
    join(router, "b", 2, model_root="/x")
    join(router, "c", 3, model_root="/x")
    [pool] = router.instances.pools()
    assert pool.model_root == "/x"
    router.handle(ev.AgentGoodbye(2, "b"), 1.0)
    [pool] = router.instances.pools()
    assert pool.model_root == "/other"  # of equally many the first by name, whatever the instances' ids
    router.check_invariants()


def test_what_instances_differ_in_is_told() -> None:
    router = state()
    for stream, name in enumerate("abc", 1):
        join(router, name, stream, identity=BRAIN, max_model_len=32_768, max_num_seqs=64)
    join(router, "d", 4, identity=HALF, max_model_len=4_096, max_num_seqs=64)
    differing = {record.info.instance_id: router.instances.differing(record) for record in router.instances.records()}
    assert {name: set(found) for name, found in differing.items() if found} == {"d": {"dtype", "max_model_len"}}
    assert differing["d"]["dtype"] == "dtype float16 and bfloat16"


def test_an_old_record_has_the_digest_that_it_had() -> None:
    assert b"traits" not in msgspec.json.encode(candidate("a"))
    read = msgspec.json.decode(msgspec.json.encode(candidate("a")), type=Candidate)
    assert read == candidate("a")


# ---- limits ----


def mixed(**settings: Any) -> RouterState:
    router = state(**settings)
    join(router, "large", 1, max_model_len=32_768, exact_prefix=False)
    join(router, "small", 2, prompt_keys(PROMPT, "m"), max_model_len=4_096)
    return router


def test_a_prompt_goes_to_an_engine_whose_context_holds_it() -> None:
    router = mixed()
    [pool] = router.instances.pools()
    assert pool.max_model_len == 32_768
    decision = decision_of(router, prompt=PROMPT)
    assert (decision.instance_id, excluded(decision)["small"]) == ("large", "context")
    replayed(decision)
    # It shortens the output to what the prompt leaves, and refuses a limit above the whole context only.
    short = PROMPT[:4_000]
    assert decision_of(router, request_id="s", prompt=short, max_output_tokens=4_096).instance_id == "small"
    assert decision_of(router, request_id="m", prompt=short, max_output_tokens=4_097).instance_id == "large"
    # Of several prompts the longest counts.
    assert decision_of(router, request_id="p", prompt=PROMPT, longest_prompt_tokens=1_000).instance_id == "small"


@pytest.mark.parametrize(("version", "taken"), [("0.31.0", "large"), ("0.32.0", "small"), ("", "small")])
def test_an_engine_may_count_the_output_into_its_context(version: str, taken: str) -> None:
    """As vLLM up to 0.31 does: it answers 400, where 0.32 shortens the output."""
    router = mixed()
    join(router, "small", 3, prompt_keys(PROMPT, "m"), max_model_len=4_096, incarnation="2", engine_version=version)
    short = PROMPT[:4_000]
    decision = decision_of(router, prompt=short, max_output_tokens=97)
    assert decision.instance_id == taken
    replayed(decision)
    assert decision_of(router, request_id="s", prompt=short, max_output_tokens=96).instance_id == "small"


def test_a_session_that_outgrows_its_engine_moves_to_the_larger_one() -> None:
    router = mixed()
    assert decision_of(router, prompt=PROMPT[:3_200], session_id="s").instance_id == "small"
    router.handle(ev.Finished("r", "OK"), 1.0)
    grown = decision_of(router, 2.0, request_id="g", prompt=PROMPT, session_id="s")
    assert (grown.instance_id, grown.notes) == ("large", ("owner_context",))
    replayed(grown)


def test_a_prompt_that_none_holds_goes_to_any_and_one_that_waits_for_the_larger_waits() -> None:
    router = mixed(limits=SaturationLimits(max_requests=1))
    assert decision_of(router, tokens=100_000).instance_id in ("large", "small")
    router.handle(ev.Finished("r", "OK"), 1.0)
    assert decision_of(router, 2.0, request_id="first", prompt=PROMPT).instance_id == "large"
    # While the small one has room for others, it waits.
    assert router.handle(ev.PlaceRequested(request("second", prompt=PROMPT, deadline_s=60.0), "g"), 2.0) == []
    assert decision_of(router, 3.0, request_id="short", prompt=PROMPT[:160]).instance_id == "small"
    effects = router.handle(ev.Finished("first", "OK"), 4.0)
    [placed] = [effect for effect in effects if isinstance(effect, ev.Placed)]
    assert (placed.request_id, placed.decision.instance_id) == ("second", "large")


def test_a_prompt_that_none_holds_does_not_count_in_the_mean_request() -> None:
    router = state()
    join(router, "a", 1, max_model_len=131_072)
    decision_of(router, request_id="usual", tokens=10_000)
    usual = router.prefill_observer.mean_work("m")
    for number in range(10):
        decision_of(router, request_id=f"long{number}", tokens=3_000_000)
    assert router.prefill_observer.mean_work("m") == usual
    join(router, "b", 2)
    decision_of(router, request_id="b", tokens=3_000_000, exclude=("a",))
    assert router.prefill_observer.mean_work("m") != usual, "the context of this engine is unknown"


def test_without_the_larger_engine_a_long_prompt_is_refused_for_now() -> None:
    router = mixed()
    router.instances.drain({"large": "1"})
    answer = router.explain(request("r", prompt=PROMPT), 2.0)
    assert isinstance(answer, ev.Refused)
    assert answer.code == "UNAVAILABLE"


def test_a_producers_context_counts_for_nothing_but_its_prefills() -> None:
    router = state()
    join(router, "d", 1, max_model_len=4_096)
    join(router, "p", 2, max_model_len=32_768, kv_transfer=KvTransfer("MOONCAKE", "http://p", KvRole.PRODUCER))
    [pool] = router.instances.pools()
    assert pool.max_model_len == 4_096
    assert decision_of(router, prompt=PROMPT).instance_id == "d"  # which answers 400


def test_a_shortlist_has_engines_that_hold_the_prompt() -> None:
    router = state()
    count = MAX_FULL_VIEW + 40
    for number in range(count):
        join(router, f"{number:03}", number, max_model_len=32_768 if number == count - 1 else 4_096)
    assert decision_of(router, prompt=PROMPT).instance_id == f"{count - 1:03}"
    router.check_invariants()


# ---- one name for two engines ----


def announced(router: RouterState, stream_id: int, agent: str, now: float, **changes: Any) -> list[ev.Effect]:
    event = ev.AgentHello(stream_id, info("a", **changes), KEY_SCHEME, 1, 0, 1.0, agent_id=agent)
    return router.handle(event, now)


def test_a_second_engine_of_one_name_is_refused_and_told() -> None:
    router = state()
    announced(router, 1, "x", 0.0, url="http://one", incarnation="1")
    router.handle(ev.LoadReported(1, "a", Load(3.0)), 3.0)
    [refused] = announced(router, 2, "y", 4.0, url="http://two", incarnation="2", node="n2")
    assert isinstance(refused, ev.RefuseReport)
    assert (refused.stream_id, refused.replaced) == (2, True)
    assert "agent x (http://one" in refused.reason
    record = router.instances.get("a")
    assert record is not None
    assert (record.info.url, record.rival) == ("http://one", ("agent y (http://two on n2)", 4.0))
    assert RIVAL_SHOWN_S > 10.0
    router.check_invariants()


def test_an_agent_takes_the_place_of_itself_and_of_one_that_is_gone() -> None:
    router = state()
    announced(router, 1, "x", 0.0)
    assert any(isinstance(effect, ev.Welcome) for effect in announced(router, 2, "x", 1.0))
    # The stream of an agent whose node is gone may stay open for minutes.
    assert any(isinstance(effect, ev.Welcome) for effect in announced(router, 3, "y", 20.0))
    router.handle(ev.AgentLost(3, "a"), 21.0)
    assert any(isinstance(effect, ev.Welcome) for effect in announced(router, 4, "z", 21.0))
