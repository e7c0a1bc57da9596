"""Reads policies' docstrings."""

from __future__ import annotations

import inspect
import re

from pointsman_router.core.policy.base import Policy


def documented_reasons(kind: type[Policy]) -> set[str]:
    """Return the reasons in a policy's docstring, its steps' included. Names before `'s` are other policies, not reasons."""
    section = (inspect.getdoc(kind) or "").partition("\nReasons: ")[2].partition("\nSource: ")[0]
    return set(re.findall(r"`(\w+)`(?!'s)", section))
