"""What the agent makes of the KV events of vLLM's offloading connectors, against the connectors' own caches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.core.kv_events import decode_batch
from pointsman_common.core.block_keys import prompt_keys
from pointsman_common.core.key_report_types import Tier
from tests.support.engines.vllm_questions import Vllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PLAY = "import vllm_offload; answer = vllm_offload.play(**asked)"
BLOCK, PER_BLOCK = 32, 2


def prompts(draw: random.Random) -> list[dict[str, Any]]:
    """Actions: prompts that share prefixes, some of them salted, and now and then a reset."""
    actions: list[dict[str, Any]] = []
    for _ in range(30):
        if draw.random() < 0.1:
            # Without the connector's part a reset leaves chunks that the agent forgets.
            actions.append({"kind": "reset", "connector": True})
            continue
        letters = [draw.randint(1, 2) for _ in range(draw.randint(1, 8))]
        prompt = [letter * 100 + at for letter in letters for at in range(BLOCK)] + [9] * draw.randint(1, 20)
        actions.append({"kind": "prompt", "prompt": prompt, "salt": draw.choice([None, None, "salt"])})
    return actions


@pytest.mark.parametrize(
    ("connector", "blocks_per_chunk", "self_describing"),
    [
        *(("OffloadingConnector", length, described) for length in (1, 2, 3) for described in (False, True)),
        ("SimpleCPUOffloadConnector", 1, True),
    ],
)
def test_offloaded_chunks_are_known_as_they_are(
    vllm: Vllm, model_folder: Path, connector: str, blocks_per_chunk: int, self_describing: bool
) -> None:
    actions = prompts(random.Random(blocks_per_chunk))
    asked = {
        "connector": connector,
        "blocks_per_chunk": blocks_per_chunk,
        "self_describing": self_describing,
        "kv_blocks": 12,
        "cpu_chunks": 12,
    }
    steps = vllm.ask(PLAY, {"model": str(model_folder), "asked": asked, "actions": actions})
    cached_blocks = CachedBlocks("m", capacity_blocks=12)
    run: list[dict[str, Any]] = []
    hosted = 0
    for action, done in zip(actions, steps, strict=True):
        for payload in done["batches"]:
            cached_blocks.apply(decode_batch(bytes.fromhex(payload)).events)
            cached_blocks.check()
        if action["kind"] == "reset":
            assert not done["batches"], "the event comes with the next step"
            continue
        run.append(action)
        for request, blocks in zip(run, done["blocks"], strict=True):
            keys = prompt_keys(request["prompt"], "m", cache_salt=request["salt"] or "")
            for tier, place in ((Tier.DEVICE, 0), (Tier.HOST, 1)):
                known = [
                    set(keys[at * PER_BLOCK : (at + 1) * PER_BLOCK]) <= cached_blocks.keys(tier)
                    for at in range(len(blocks))
                ]
                assert known == [block[place] for block in blocks], (tier.name, request)
                hosted += sum(known) if tier is Tier.HOST else 0
    assert hosted > 20
    assert cached_blocks.counts.orphans == 0
