"""The policies that this installation has."""

from __future__ import annotations

from pointsman_cli.extras import is_installed
from pointsman_router.core.policy.registry import POLICIES, Policies


def installed_policies() -> Policies:
    """Return the router's policies and, if extra `lab` is installed, other routers' rules."""
    if not is_installed("lab"):
        return POLICIES
    from pointsman_lab.rival_policies.registry import POLICIES as WITH_RIVALS

    return WITH_RIVALS
