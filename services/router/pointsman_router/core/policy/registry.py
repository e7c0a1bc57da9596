"""All policies by name: Pointsman's own, and those of reference/ (baselines and other routers' scores). Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pointsman_router.core.policy.adaptive import Adaptive, AdaptiveOffload
from pointsman_router.core.policy.auto import Auto
from pointsman_router.core.policy.base import Policy, SettingError, build
from pointsman_router.core.policy.elastic import Elastic
from pointsman_router.core.policy.foresight import Foresight
from pointsman_router.core.policy.linear import Additive, Linear
from pointsman_router.core.policy.lmetric import Lmetric, Lmetric1, Lpwl
from pointsman_router.core.policy.migrate import Migrate
from pointsman_router.core.policy.reference.aibrix_prefix import AibrixPrefix
from pointsman_router.core.policy.reference.baselines import LeastRequests, Random, RoundRobin, Sticky
from pointsman_router.core.policy.reference.dynamo_kv import DynamoKv
from pointsman_router.core.policy.reference.llmd_default import LlmdDefault
from pointsman_router.core.policy.reference.preble import Preble
from pointsman_router.core.policy.reference.sglang_cache_aware import SglangCacheAware
from pointsman_router.core.policy.unified import Unified

_KINDS: tuple[type[Policy], ...] = (
    Unified,
    Auto,
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
# The policy of those who choose none. docs/findings.md compares it with `unified` on all kinds of traffic.
DEFAULT_POLICY = Auto.name


def make_policy(name: str, settings: Mapping[str, object] | None = None) -> Policy:
    """Return the policy `name` with `settings` over its defaults. Raises SettingError for an unknown policy or setting, or a
    value out of range."""
    kind = POLICIES.get(name)
    if kind is None:
        raise SettingError("name", f"no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return build(kind, settings or {})
