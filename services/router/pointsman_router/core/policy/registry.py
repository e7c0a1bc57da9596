"""The router's policies by name. Other routers' rules are the lab's (pointsman_lab.rival_policies). Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pointsman_router.core.policy.adaptive import Adaptive, AdaptiveOffload
from pointsman_router.core.policy.auto import Auto
from pointsman_router.core.policy.base import Policy, SettingError, build
from pointsman_router.core.policy.baselines import LeastRequests, Random, RoundRobin, Sticky
from pointsman_router.core.policy.elastic import Elastic
from pointsman_router.core.policy.foresight import Foresight
from pointsman_router.core.policy.linear import Additive, Linear
from pointsman_router.core.policy.lmetric import Lmetric, Lmetric1, Lpwl
from pointsman_router.core.policy.migrate import Migrate
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
)
Policies = Mapping[str, type[Policy]]
POLICIES: Policies = {kind.name: kind for kind in _KINDS}
# Names of the lab's policies. A process that has the lab passes their classes to whoever makes policies.
LAB_POLICIES = ("dynamo_kv", "sglang_cache_aware", "llmd_default", "llmd_affinity", "aibrix_prefix", "preble")
# The policy of those who choose none. docs/findings.md compares it with `unified` on all kinds of traffic.
DEFAULT_POLICY = Auto.name


def make_policy(name: str, settings: Mapping[str, object] | None = None, policies: Policies = POLICIES) -> Policy:
    """Return the policy `name` of `policies` with `settings` over its defaults. `name` may have the form NAME:SETTING=VALUE,...;
    such a setting comes before the same one of `settings`. Raises SettingError for an unknown policy or setting, or a value out
    of range."""
    name, named = parsed(name)
    kind = policies.get(name)
    if kind is None:
        if name in LAB_POLICIES:
            raise SettingError("name", f"policy {name!r} belongs to the lab, which is not installed: pointsman[lab]")
        raise SettingError("name", f"no policy {name!r}; there are {', '.join(sorted(policies))}")
    return build(kind, {**(settings or {}), **named})


def place_of(error: SettingError, settings: Mapping[str, object], policy: str, apart: str) -> str:
    """Return which of two fields has what make_policy() refuses: `policy`, NAME:SETTING=VALUE,..., or `apart`, its argument
    `settings`."""
    return apart if error.field.removeprefix("settings.") in settings else policy


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and settings of NAME or NAME:SETTING=VALUE,...; a value is JSON, or else text. Raises SettingError for
    another form."""
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        setting, equals, value = item.partition("=")
        if not equals:
            raise SettingError("name", f"{item!r} in {text!r} is not SETTING=VALUE")
        settings[setting.strip()] = _scalar(value.strip())
    return name, settings


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # no JSON, an integer of thousands of digits, or lists in lists
        return text
