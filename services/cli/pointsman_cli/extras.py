"""Which extras of the distribution are installed."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata


@cache
def is_installed(extra: str) -> bool:
    """Return whether all packages of an extra are installed. The code of all parts is in one wheel, so only the packages tell.

    A package that only some versions of Python need is not looked for.
    """
    needed = re.compile(rf"([\w.-]+)[^;]*;\s*extra == ['\"]{extra}['\"]$")
    try:
        for requirement in metadata.requires("pointsman") or ():
            if found := needed.match(requirement):
                metadata.distribution(found[1])
    except metadata.PackageNotFoundError:
        return False
    return True
