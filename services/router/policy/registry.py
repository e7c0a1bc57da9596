"""Policies by name. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from services.router.policy.base import Policy, SettingError, build
from services.router.policy.baselines import LeastRequests, Random, RoundRobin, Sticky
from services.router.policy.unified import Unified

POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (Unified, Sticky, LeastRequests, RoundRobin, Random)}


def make_policy(name: str, settings: Mapping[str, object] | None = None) -> Policy:
    """The policy `name` with `settings` over its defaults. SettingError names an unknown policy or setting."""
    kind = POLICIES.get(name)
    if kind is None:
        raise SettingError("name", f"no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return build(kind, settings or {})
