"""What the programs of other routers choose in drawn states, and what Pointsman's readings of their rules choose there.

`python -m studies.rival_rules` draws the states with the programs and stores them in tests/data/rival_choices.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pointsman_lab.rival_policies.registry import make_policy
from tests.support.repository import REPOSITORY
from tests.support.router_values import candidate, request, view

# Program -> the policy that has its rule.
POLICY_OF = {"dynamo": "dynamo_kv", "sglang-router": "sglang_cache_aware", "smg": "sglang_cache_aware"}
FOLDER = REPOSITORY / "tests" / "data" / "rival_choices"

State = dict[str, Any]


def read_states(rival: str) -> list[State]:
    """Return the stored states of a program."""
    with gzip.open(_file(rival), "rt") as lines:
        return [json.loads(line) for line in lines]


def write_states(rival: str, states: Iterable[State]) -> None:
    """Store the states of a program; equal states make an equal file."""
    text = "".join(json.dumps(state) + "\n" for state in states)
    _file(rival).write_bytes(gzip.compress(text.encode(), mtime=0))


def agrees(state: State) -> bool:
    """Return whether the program chose one of the instances that are best by our policy. Ties are drawn, there and here."""
    candidates = [
        candidate(
            name,
            cached=instance["cached"],
            new=state["input"] - instance["cached"],
            num_requests=instance["requests"],
            pending_prefill_tokens=instance.get("pending", 0),
            ongoing_tokens=instance.get("ongoing", 0),
            ongoing_decode_tokens=instance.get("decoding", 0),
        )
        for name, instance in state["instances"].items()
    ]
    policy = make_policy(POLICY_OF[state["rival"]])
    scores = policy.choose(request(tokens=state["input"]), view(*candidates), random.Random(0)).scores
    return bool(scores[state["chosen"]] == min(scores.values()))


def _file(rival: str) -> Path:
    return FOLDER / f"{rival}.jsonl.gz"
