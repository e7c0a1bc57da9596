"""What policies' docstrings say."""

from __future__ import annotations

import inspect
import re

from pointsman.router.core.policy.base import Policy


def documented_reasons(kind: type[Policy]) -> set[str]:
    """The reasons that a policy's docstring says it may give, its steps' included, but not those of `another`'s."""
    section = (inspect.getdoc(kind) or "").partition("\nReasons: ")[2].partition("\nSource: ")[0]
    return set(re.findall(r"`(\w+)`(?!'s)", section))
