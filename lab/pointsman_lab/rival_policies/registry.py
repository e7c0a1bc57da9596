"""All policies by name: the router's, and other routers' rules. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pointsman_lab.rival_policies.aibrix_prefix import AibrixPrefix
from pointsman_lab.rival_policies.dynamo_kv import DynamoKv
from pointsman_lab.rival_policies.llmd_affinity import LlmdAffinity
from pointsman_lab.rival_policies.llmd_default import LlmdDefault
from pointsman_lab.rival_policies.preble import Preble
from pointsman_lab.rival_policies.sglang_cache_aware import SglangCacheAware
from pointsman_router.core.policy import registry
from pointsman_router.core.policy.base import Policy
from pointsman_router.core.policy.registry import Policies

_KINDS: tuple[type[Policy], ...] = (DynamoKv, SglangCacheAware, LlmdDefault, LlmdAffinity, AibrixPrefix, Preble)
POLICIES: Policies = {**registry.POLICIES, **{kind.name: kind for kind in _KINDS}}


def make_policy(name: str, settings: Mapping[str, object] | None = None) -> Policy:
    """Return the policy `name`, the router's or a rival's, as the router's make_policy() does."""
    return registry.make_policy(name, settings, POLICIES)
