"""Shorthands that make the router's values for tests."""

from __future__ import annotations

from typing import Any

from pointsman_common.core.block_keys import KEY_SCHEME, digest_of, prompt_keys
from pointsman_common.core.key_report_types import SnapshotBegin, SnapshotChunk, SnapshotEnd
from pointsman_lab.rival_policies.registry import make_policy
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.event_trust import EventTrust
from pointsman_router.core.placement_types import (
    Candidate,
    FleetView,
    InstanceInfo,
    InstanceState,
    KvTransfer,
    PlacementRequest,
)
from pointsman_router.core.policy.base import Policy
from pointsman_router.core.router_state import RouterState, StateSettings


def info(name: str = "a", **changes: Any) -> InstanceInfo:
    values: dict[str, Any] = {
        "instance_id": name,
        "incarnation": "1",
        "url": f"http://{name}",
        "model": "m",
        "served_names": ("m", "alias"),
        "kv_transfer": KvTransfer("MOONCAKE", f"http://{name}:8998"),
    }
    return InstanceInfo(**{**values, **changes})


def request(
    request_id: str = "r", tokens: int = 0, prompt: list[int] | None = None, **changes: Any
) -> PlacementRequest:
    values: dict[str, Any] = {"request_id": request_id, "model": "m", "input_tokens": tokens}
    if prompt is not None:
        values |= {"input_tokens": len(prompt), "keys": tuple(prompt_keys(prompt, "m"))}
    return PlacementRequest(**{**values, **changes})


def candidate(name: str, *, new: int = 100, cached: int = 0, **changes: Any) -> Candidate:
    values: dict[str, Any] = {
        "instance_id": name,
        "incarnation": "1",
        "state": InstanceState.READY,
        "cached_tokens": cached,
        "new_tokens": new,
        "num_requests": 0,
        "pending_prefill_tokens": 0,
        "ongoing_decode_tokens": 0,
        "ongoing_tokens": 0,
        "running": 0,
        "waiting": 0,
        "kv_usage": 0.0,
        "reported_at": 0.0,
    }
    return Candidate(**{**values, **changes})


def view(*candidates: Candidate, owner: str = "", turn: int = 0) -> FleetView:
    return FleetView(candidates, owner, turn)


def state(policy: str = "unified", *, owns_all: bool = True, **settings: Any) -> RouterState:
    return RouterState(make_policy(policy), StateSettings(**settings), router_id="t", owns_all=owns_all)


def set_policy(state_: RouterState, policy: Policy, now: float = 0.0) -> None:
    """Make `policy` decide from now on."""
    state_.handle(ev.PolicySet(policy), now)


def hello(
    state_: RouterState,
    name: str,
    stream_id: int,
    now: float = 0.0,
    *,
    latest: int = 0,
    report_interval_s: float = 0.0,
    **changes: Any,
) -> list[ev.Effect]:
    hello_ = ev.AgentHello(
        stream_id, info(name, **changes), KEY_SCHEME, 1, latest, report_interval_s=report_interval_s, accepts_pace=True
    )
    return state_.handle(hello_, now)


def join(
    state_: RouterState,
    name: str,
    stream_id: int,
    keys: list[int] | None = None,
    now: float = 0.0,
    *,
    proven: bool = True,
    **changes: Any,
) -> None:
    """Send an instance's hello and its complete snapshot. `proven`: its events are trusted, as if answers had confirmed them."""
    hello(state_, name, stream_id, now, **changes)
    keys = keys or []
    for message in (SnapshotBegin(0), SnapshotChunk(1, keys), SnapshotEnd(0, len(keys), digest_of(1, keys))):
        state_.handle(ev.KeysReported(stream_id, name, message), now)
    if proven and (record := state_.instances.get(name)) is not None and record.trust.losses == 0:
        record.trust = EventTrust(proven=True, reason="")
        record.forget_snapshot()
        state_.prefix_knowledge.computed_prompts.drop(name)


def place(
    state_: RouterState, request_: PlacementRequest, now: float = 0.0, gateway: str = "g"
) -> ev.Placed | ev.Refused:
    [answer] = [
        effect
        for effect in state_.handle(ev.PlaceRequested(request_, gateway), now)
        if isinstance(effect, ev.Placed | ev.Refused)
    ]
    return answer


def finish(state_: RouterState, now: float = 0.0) -> list[ev.Effect]:
    """Send GoOn until nothing is unfinished; return the effects."""
    effects: list[ev.Effect] = []
    while state_.unfinished:
        effects += state_.handle(ev.GoOn(), now)
    return effects
