"""Policies by name: ours, the baselines, and the peers' (peers.py). Pure."""

from __future__ import annotations

from collections.abc import Mapping

from services.router.policy.adaptive import Adaptive, AdaptiveOffload
from services.router.policy.base import Policy, SettingError, build
from services.router.policy.baselines import LeastRequests, Random, RoundRobin, Sticky
from services.router.policy.elastic import Elastic
from services.router.policy.foresight import Foresight
from services.router.policy.linear import Additive, Linear
from services.router.policy.lmetric import Lmetric, Lmetric1, Lpwl
from services.router.policy.migrate import Migrate
from services.router.policy.peers import AibrixPrefix, DynamoKv, LlmdDefault, Preble, SglangCacheAware
from services.router.policy.unified import Unified

_KINDS: tuple[type[Policy], ...] = (
    Unified,
    Elastic,
    Migrate,
    Foresight,
    Lmetric,
    Lmetric1,
    Lpwl,
    Linear,
    Additive,
    Adaptive,
    AdaptiveOffload,
    Sticky,
    LeastRequests,
    RoundRobin,
    Random,
    DynamoKv,
    SglangCacheAware,
    LlmdDefault,
    AibrixPrefix,
    Preble,
)
POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in _KINDS}


def make_policy(name: str, settings: Mapping[str, object] | None = None) -> Policy:
    """The policy `name` with `settings` over its defaults. SettingError names an unknown policy or setting."""
    kind = POLICIES.get(name)
    if kind is None:
        raise SettingError("name", f"no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return build(kind, settings or {})
