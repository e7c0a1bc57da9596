"""The state that the router's benchmarks use: long prompts whose prefixes are spread over a fleet with full caches."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pointsman_common.core.block_keys import KEY_SCHEME, digest_of, prompt_keys
from pointsman_common.core.key_report_types import SnapshotBegin, SnapshotChunk, SnapshotEnd
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.event_trust import EventTrust
from pointsman_router.core.placement_types import InstanceInfo
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.router_state import RouterState, StateSettings

KEYS_PER_INSTANCE = 62_500
PROMPT_TOKENS = 130_000
# Number of keys that an instance has at least and no other has.
OWN_KEYS = 512


def long_prompt(seed: int = 0) -> list[int]:
    """Return the 8,125 keys of a 130,000-token prompt."""
    rng = random.Random(seed)
    return prompt_keys([rng.randrange(150_000) for _ in range(PROMPT_TOKENS)], "m")


def cached_keys(keys: Sequence[int], number: int, count: int = KEYS_PER_INSTANCE) -> list[int]:
    """Return the keys that instance `number` has cached: a prefix of the prompt, of random length, and other prompts' blocks."""
    rng = random.Random(1_000 + number)
    prefix = list(keys[: prefix_length(keys, number)])
    return prefix + [rng.getrandbits(64) for _ in range(max(count - len(prefix), OWN_KEYS))]


def prefix_length(keys: Sequence[int], number: int) -> int:
    """Return how many of the prompt's keys instance `number` has cached."""
    return random.Random(number).randrange(len(keys))


def info(number: int) -> InstanceInfo:
    """Return instance `number` of the fleet."""
    name = f"i{number:04d}"
    return InstanceInfo(name, "1", f"http://{name}", "m", kv_capacity_tokens=KEYS_PER_INSTANCE * 16)


def filled(instances: int, keys: Sequence[int], count: int = KEYS_PER_INSTANCE) -> RouterState:
    """Return a router's state with `instances` that have `count` keys each, which count as exact."""
    state = RouterState(make_policy("unified"), StateSettings())
    for number in range(instances):
        instance = info(number)
        held = cached_keys(keys, number, count)
        state.handle(ev.AgentHello(number, instance, KEY_SCHEME, 1, 0), 0.0)
        for message in (SnapshotBegin(0), SnapshotChunk(1, held), SnapshotEnd(0, len(held), digest_of(1, held))):
            state.handle(ev.KeysReported(number, instance.instance_id, message), 0.0)
        record = state.instances.get(instance.instance_id)
        assert record is not None
        # As if answers had confirmed its events.
        record.trust = EventTrust(proven=True, reason="")
        record.forget_snapshot()
    assert all(record.exact for record in state.instances.records())
    return state
