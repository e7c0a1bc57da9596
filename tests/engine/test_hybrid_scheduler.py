"""Models with several KV cache groups: the agent's keys predict the very prefixes that vLLM's KV cache manager finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import decode_batch
from pointsman_common.core.block_keys import KEY_TOKENS, prompt_keys
from pointsman_router.core.prefix.exact_index import PrefixIndex
from tests.support.engines.vllm_questions import Vllm
from tests.support.prompt_strategies import prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PLAY = "import vllm_groups; answer = vllm_groups.play(**asked)"
LENGTH = 320


@st.composite
def models(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Groups in any order: full attention has the smallest blocks, and a Mamba group the same."""
    size = draw(st.sampled_from([16, 32]))
    full = {"kind": "full_attention", "block_size": size, "window": 0}
    others = draw(
        st.lists(
            st.one_of(
                st.fixed_dictionaries(
                    {
                        "kind": st.just("sliding_window"),
                        "block_size": st.sampled_from([size, size, 2 * size]),
                        "window": st.integers(2, 100),
                    }
                ),
                st.just(full),
            ),
            min_size=1,
            max_size=3,
        )
    )
    if draw(st.integers(0, 3)) == 0:
        # vLLM gives Mamba layers and attention blocks of one size.
        others = [{**other, "block_size": size} for other in others]
        others.append({"kind": "mamba", "block_size": size, "window": 0})
    return draw(st.permutations([full, *others]))


PROMPTS = prompts([0, 16, 40, 64, 128, 200], st.integers(2, 250), LENGTH)
REQUESTS = st.lists(
    st.fixed_dictionaries({"prompt": PROMPTS, "max_tokens": st.integers(1, 40)}), min_size=1, max_size=8
)


@st.composite
def scripts(draw: st.DrawFn) -> dict[str, Any]:
    """Arrivals, steps, aborts and resets. After each step vLLM is asked for hits of the prompts and of others."""
    requests: dict[str, dict[str, Any]] = {f"r{number}": request for number, request in enumerate(draw(REQUESTS))}
    groups = draw(models())
    actions: list[list[Any]] = []
    submitted: list[str] = []
    for name, request in requests.items():
        # Tokens that prompts have, too, so that a later turn can contain an answer.
        request["answer"] = [draw(st.integers(1, 5))] * LENGTH
        actions.append(["submit", name])
        submitted.append(name)
        for _ in range(draw(st.integers(0, 6))):
            action = draw(st.sampled_from(["step"] * 12 + ["abort", "reset"]))
            actions.append([action, draw(st.sampled_from(submitted)) if action == "abort" else None])
    actions += [["step", None]] * draw(st.integers(5, 40))
    asked = [request["prompt"] + request["answer"][: request["max_tokens"]] for request in requests.values()]
    whole = sum(LENGTH // group["block_size"] + 1 for group in groups)
    dense = all(group["kind"] == "full_attention" for group in groups)
    return {
        "groups": groups,
        "requests": requests,
        "actions": actions,
        "prompts": [
            *asked,
            *(prompt[: draw(st.integers(1, len(prompt)))] for prompt in asked),
            *draw(st.lists(PROMPTS, max_size=4)),
        ],
        "max_model_len": LENGTH,
        "max_num_batched_tokens": draw(st.sampled_from([16, 48, 64, 128, 512])),
        "max_num_seqs": draw(st.integers(1, 4)),
        # Room for one request at least, and for a few at most, so that blocks are evicted.
        "kv_blocks": whole + draw(st.integers(4, 60)),
        "retention_interval": None if dense else draw(st.sampled_from([None, None, 0, 1])),
    }


def predicted(index: PrefixIndex, prompt: list[int], block_size: int) -> int:
    """As the router predicts: whole blocks, without the last token."""
    keys = prompt_keys(prompt, "model")[: (len(prompt) - 1) // KEY_TOKENS]
    found = index.leading_blocks(keys, ["a"])["a"] * KEY_TOKENS
    return found - found % block_size


def compare(vllm: Vllm, model: Path, script: dict[str, Any]) -> int:
    """Return the number of tokens that were found cached, by both sides."""
    cached_blocks, index, seq, total = CachedBlocks("model", capacity_blocks=script["kv_blocks"]), PrefixIndex(), 0, 0
    index.set_sparse("a", True)
    block_size = min(group["block_size"] for group in script["groups"])
    for number, step in enumerate(vllm.ask(PLAY, {"model": str(model), "script": script})):
        for payload in step["payloads"]:
            cached_blocks.apply(decode_batch(bytes.fromhex(payload)).events)
        cached_blocks.check()
        assert not cached_blocks.unusable_reason
        while seq < cached_blocks.latest_seq:
            seq += 1
            delta = cached_blocks.delta(seq)
            if delta.cleared:
                index.drop("a")
            index.remove("a", delta.removed)
            index.add("a", delta.added)
        for prompt, hit in zip(script["prompts"], step["hits"], strict=True):
            assert predicted(index, prompt, block_size) == hit, f"step {number}, a prompt of {len(prompt)} tokens"
            total += hit
    assert not cached_blocks.counts.unknown_removed
    assert not cached_blocks.counts.malformed
    return total


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=scripts())
def test_predicted_hits_are_vllms(vllm: Vllm, model_folder: Path, script: dict[str, Any]) -> None:
    compare(vllm, model_folder, script)
